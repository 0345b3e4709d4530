"""The official Python SDK, measured: unmodified, as its documentation has it used.

Usage: sdk.py sync|async. Each line of standard input is one thing to do, each
line of standard output what came of it:

    first RUNTIME       create a sandbox, run its first command    MILLISECONDS ID
    stream ID COMMAND   run a command in a sandbox that is there   SECONDS BYTES
    create RUNTIME      create a sandbox                           MILLISECONDS ID
    failing RUNTIME     create one whose entrypoint is missing     MILLISECONDS

What first, create and failing make, the caller deletes.
"""

import asyncio
import sys
import time
from datetime import timedelta

from opensandbox import Sandbox, SandboxSync
from opensandbox.exceptions import SandboxException

SYNC = sys.argv[1] == "sync"
loop = asyncio.new_event_loop()
standing = {}


def done(it):
    """The result of a call, of either flavour."""
    return it if SYNC else loop.run_until_complete(it)


def made(runtime, **more):
    return done((SandboxSync if SYNC else Sandbox).create(
        "base",
        timeout=timedelta(minutes=10),
        resource={"cpu": "1", "memory": "512Mi"},
        extensions={"sandboxd.runtime": runtime},
        **more,
    ))


def first(runtime):
    start = time.perf_counter()
    sandbox = made(runtime)
    execution = done(sandbox.commands.run("echo hello"))
    took = time.perf_counter() - start
    assert execution.logs.stdout[0].text.rstrip("\n") == "hello", execution
    done(sandbox.close())
    return took * 1000, sandbox.id


def create(runtime):
    start = time.perf_counter()
    sandbox = made(runtime)
    took = time.perf_counter() - start
    done(sandbox.close())
    return took * 1000, sandbox.id


def failing(runtime):
    start = time.perf_counter()
    try:
        made(runtime, entrypoint=["/missing"])
    except SandboxException:
        return ((time.perf_counter() - start) * 1000,)
    raise AssertionError("a sandbox without its entrypoint was made")


def stream(sandbox_id, command):
    sandbox = standing.get(sandbox_id)
    if sandbox is None:
        sandbox = standing[sandbox_id] = done((SandboxSync if SYNC else Sandbox).connect(sandbox_id))
    start = time.perf_counter()
    execution = done(sandbox.commands.run(command))
    took = time.perf_counter() - start
    assert execution.exit_code == 0, execution.error
    return took, sum(len(m.text) for m in execution.logs.stdout)


for line in sys.stdin:
    verb, rest = line.rstrip("\n").split(" ", 1)
    do = {"first": first, "create": create, "failing": failing, "stream": stream}[verb]
    print(*do(*rest.split(" ", 1)), flush=True)
