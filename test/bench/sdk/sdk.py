"""The official Python SDK, measured: unmodified, as its documentation has it used.

Usage: sdk.py sync|async. Each line of standard input is one thing to do, each
line of standard output what came of it:

    first RUNTIME       create a sandbox, run its first command    MILLISECONDS ID
    stream ID COMMAND   run a command in a sandbox that is there   SECONDS BYTES

What first makes, the caller deletes.
"""

import asyncio
import sys
import time
from datetime import timedelta

from opensandbox import Sandbox, SandboxSync

SYNC = sys.argv[1] == "sync"
loop = asyncio.new_event_loop()
standing = {}


def done(it):
    """The result of a call, of either flavour."""
    return it if SYNC else loop.run_until_complete(it)


def first(runtime):
    start = time.perf_counter()
    sandbox = done((SandboxSync if SYNC else Sandbox).create(
        "base",
        timeout=timedelta(minutes=10),
        resource={"cpu": "1", "memory": "512Mi"},
        extensions={"sandboxd.runtime": runtime},
    ))
    execution = done(sandbox.commands.run("echo hello"))
    took = time.perf_counter() - start
    assert execution.logs.stdout[0].text.rstrip("\n") == "hello", execution
    done(sandbox.close())
    return took * 1000, sandbox.id


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
    print(*(first(rest) if verb == "first" else stream(*rest.split(" ", 1))), flush=True)
