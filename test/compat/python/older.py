"""What a program written for an older release of the official SDK does: the
methods of 0.1.15, unmodified.

Usage: older.py RUNTIME; else as story.py.
"""

import asyncio
import sys
from datetime import timedelta

from opensandbox import Sandbox, SandboxSync
from opensandbox.models.execd import RunCommandOpts
from opensandbox.models.filesystem import SearchEntry, WriteEntry
from opensandbox.models.sandboxes import NetworkPolicy, NetworkRule, SandboxFilter
from opensandbox.sync.manager import SandboxManagerSync

runtime = sys.argv[1]
where = {"extensions": {"sandboxd.runtime": runtime}, "resource": {"cpu": "1", "memory": "256Mi"}}


def chapter(name: str) -> None:
    print(f"older-{runtime}: {name}", flush=True)


def stdout(execution) -> str:
    return "".join(m.text.rstrip("\n") + "\n" for m in execution.logs.stdout)


chapter("create")
policy = NetworkPolicy(default_action="deny", egress=[NetworkRule(action="allow", target="203.0.113.0/24")])
sandbox = SandboxSync.create(
    "base", timeout=timedelta(minutes=10), env={"GREETING": "hello"}, metadata={"older": runtime}, network_policy=policy, **where
)
assert sandbox.is_healthy() and sandbox.get_info().status.state == "Running"

chapter("commands")
e = sandbox.commands.run("echo $GREETING; echo there; exit 7")
assert stdout(e) == "hello\nthere\n" and e.error.value == "7", e
e = sandbox.commands.run("echo late; sleep 0.1", opts=RunCommandOpts(background=True))
while sandbox.commands.get_command_status(e.id).running:
    pass
assert sandbox.commands.get_background_command_logs(e.id).content == "late\n"

chapter("files")
sandbox.files.write_files([WriteEntry(path="/tmp/hello.txt", data="Hello", mode=644)])
assert sandbox.files.read_file("/tmp/hello.txt") == "Hello"
assert [f.path for f in sandbox.files.search(SearchEntry(path="/tmp", pattern="*.txt"))] == ["/tmp/hello.txt"]

chapter("manager")
manager = SandboxManagerSync.create()
page = manager.list_sandbox_infos(SandboxFilter(states=["Running"], metadata={"older": runtime}))
assert [i.id for i in page.sandbox_infos] == [sandbox.id], page
assert sandbox.get_egress_policy().egress[0].target == "203.0.113.0/24"
sandbox.renew(timedelta(minutes=30))
assert sandbox.get_endpoint(8000).endpoint.endswith("/8000")
assert sandbox.get_metrics().memory_total_in_mib <= 260
manager.kill_sandbox(sandbox.id)
manager.close()
sandbox.close()


async def asynchronous() -> None:
    sandbox = await Sandbox.create("base", timeout=timedelta(minutes=5), **where)
    both = await asyncio.gather(sandbox.commands.run("sleep 0.2; echo 1"), sandbox.commands.run("echo 2"))
    assert [stdout(e) for e in both] == ["1\n", "2\n"], both
    await sandbox.pause()
    while (await sandbox.get_info()).status.state != "Paused":
        await asyncio.sleep(0.05)
    resumed = await Sandbox.resume(sandbox.id)
    assert stdout(await resumed.commands.run("echo back")) == "back\n"
    await resumed.kill()
    await resumed.close()
    await sandbox.close()


chapter("asynchronous")
asyncio.run(asynchronous())
chapter("the end")
