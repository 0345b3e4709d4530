"""One user's afternoon with the official OpenSandbox SDK, unmodified.

Usage: story.py RUNTIME. The daemon is named by OPEN_SANDBOX_DOMAIN and
OPEN_SANDBOX_API_KEY, as the SDK's own documentation says. Prints one line for
each chapter; an assertion that fails ends it.
"""

import os
import sys
import time
from datetime import timedelta

from opensandbox import SandboxSync
from opensandbox.manager import SandboxManager  # noqa: F401  (imports must work)
from opensandbox.models.execd import ExecutionHandlers, RunCommandOpts  # noqa: F401
from opensandbox.models.filesystem import (
    ContentReplaceEntry,
    DirectoryListEntry,
    MoveEntry,
    SearchEntry,
    SetPermissionEntry,
    WriteEntry,
)
from opensandbox.models.sandboxes import NetworkPolicy, NetworkRule, SandboxFilter
from opensandbox.sync.manager import SandboxManagerSync

runtime = sys.argv[1]


def chapter(name: str) -> None:
    print(f"{runtime}: {name}", flush=True)


def stdout(execution) -> str:
    return "\n".join(m.text for m in execution.logs.stdout)


sandbox = SandboxSync.create(
    "python",
    timeout=timedelta(minutes=10),
    resource={"cpu": "1", "memory": "512Mi"},
    env={"GREETING": "hello"},
    metadata={"story": runtime},
    network_policy=NetworkPolicy(default_action="deny", egress=[NetworkRule(action="allow", target="203.0.113.0/24")]),
    extensions={"sandboxd.runtime": runtime},
)
try:
    chapter("create")
    assert sandbox.is_healthy()
    info = sandbox.get_info()
    assert info.id == sandbox.id and info.status.state == "Running", info
    assert info.entrypoint[-3:] == ["tail", "-f", "/dev/null"], info.entrypoint
    assert info.metadata == {"story": runtime}, info.metadata

    chapter("commands")
    e = sandbox.commands.run("echo $GREETING; echo oops >&2; exit 7")
    assert stdout(e) == "hello", e
    assert [m.text for m in e.logs.stderr] == ["oops"], e
    assert e.exit_code == 7 and e.error.name == "CommandExecError", e
    e = sandbox.commands.run("python3 -c 'print(6*7)'")
    assert stdout(e) == "42" and e.exit_code == 0, e
    e = sandbox.commands.run(["printf", "%s", "a b"])
    assert stdout(e) == "a b", e
    e = sandbox.commands.run("pwd", opts=RunCommandOpts(working_directory="/var", timeout=timedelta(seconds=20)))
    assert stdout(e) == "/var", e
    e = sandbox.commands.run("sleep 60", opts=RunCommandOpts(timeout=timedelta(seconds=1)))
    assert e.error is not None and e.exit_code != 0, e
    e = sandbox.commands.run("cat /proc/1/comm; id -u")
    assert stdout(e).splitlines()[-1] == "0", e

    chapter("background")
    e = sandbox.commands.run("for i in 1 2 3; do echo tick $i; done; exit 3", opts=RunCommandOpts(background=True))
    for _ in range(100):
        status = sandbox.commands.get_command_status(e.id)
        if not status.running:
            break
        time.sleep(0.05)
    assert status.exit_code == 3, status
    logs = sandbox.commands.get_background_command_logs(e.id)
    assert logs.content.splitlines() == ["tick 1", "tick 2", "tick 3"], logs
    e = sandbox.commands.run("sleep 1000", opts=RunCommandOpts(background=True))
    sandbox.commands.interrupt(e.id)

    chapter("sessionless environment")
    sandbox.commands.run("true", opts=RunCommandOpts(envs={"A": "1"}))
    e = sandbox.commands.run("echo $A-$GREETING", opts=RunCommandOpts(envs={"A": "1"}))
    assert stdout(e) == "1-hello", e

    chapter("files")
    files = sandbox.files
    files.create_directories([WriteEntry(path="/work/data", mode=755)])
    files.write_file("/work/data/a.txt", "hällo\n", mode=644)
    assert files.read_file("/work/data/a.txt") == "hällo\n"
    blob = os.urandom(3 << 20)
    files.write_files([WriteEntry(path="/work/data/b.bin", data=blob), WriteEntry(path="/work/data/c.txt", data="c")])
    assert files.read_bytes("/work/data/b.bin") == blob
    assert files.read_bytes("/work/data/b.bin", range_header="bytes=10-19") == blob[10:20]
    found = files.get_file_info(["/work/data/a.txt", "/work/data/b.bin"])
    assert found["/work/data/a.txt"].mode == 644 and found["/work/data/b.bin"].size == len(blob), found
    assert sorted(f.path for f in files.search(SearchEntry(path="/work", pattern="*.txt"))) == [
        "/work/data/a.txt",
        "/work/data/c.txt",
    ]
    files.replace_contents([ContentReplaceEntry(path="/work/data/a.txt", old_content="hällo", new_content="bye")])
    assert files.read_file("/work/data/a.txt") == "bye\n"
    files.set_permissions([SetPermissionEntry(path="/work/data/a.txt", owner="nobody", group="nogroup", mode=600)])
    entry = files.get_file_info(["/work/data/a.txt"])["/work/data/a.txt"]
    assert (entry.owner, entry.group, entry.mode) == ("nobody", "nogroup", 600), entry
    files.move_files([MoveEntry(src="/work/data/c.txt", dest="/work/moved/c.txt")])
    listed = [f.path for f in files.list_directory(DirectoryListEntry(path="/work", depth=2))]
    assert "/work/moved/c.txt" in listed, listed
    files.delete_files(["/work/moved/c.txt"])
    files.delete_directories(["/work/data"])
    assert not [f for f in files.search(SearchEntry(path="/work", pattern="*"))]

    chapter("network policy")
    policy = sandbox.get_egress_policy()
    assert policy.default_action == "deny" and policy.egress[0].target == "203.0.113.0/24", policy
    probe = (
        "import socket,sys\n"
        "try: socket.create_connection(('198.51.100.1', 80), 5)\n"
        "except OSError as e: print(e.errno)\n"
    )
    e = sandbox.commands.run(["python3", "-c", probe])
    assert stdout(e) == "111", e  # ECONNREFUSED, at once

    chapter("metrics, endpoint")
    m = sandbox.get_metrics()
    assert 0 < m.memory_used_in_mib <= m.memory_total_in_mib <= 520, m
    assert sandbox.get_endpoint(8000).endpoint.endswith("/8000")

    chapter("renew, metadata, list")
    before = sandbox.get_info().expires_at
    sandbox.renew(timedelta(hours=1))
    assert sandbox.get_info().expires_at > before
    assert sandbox.patch_metadata({"story": None, "page": "2"}).metadata == {"page": "2"}
    manager = SandboxManagerSync.create()
    page = manager.list_sandbox_infos(SandboxFilter(states=["Running"], metadata={"page": "2"}))
    assert sandbox.id in [s.id for s in page.sandbox_infos], page

    chapter("pause, resume")
    sandbox.pause()
    for _ in range(100):
        if sandbox.get_info().status.state == "Paused":
            break
        time.sleep(0.05)
    assert sandbox.get_info().status.state == "Paused"
    assert not sandbox.is_healthy()
    resumed = SandboxSync.resume(sandbox.id)
    assert stdout(resumed.commands.run("echo back")) == "back"
    resumed.close()

    chapter("connect")
    again = SandboxSync.connect(sandbox.id)
    assert stdout(again.commands.run("echo $GREETING")) == "hello"
    again.close()
finally:
    sandbox.kill()
    sandbox.close()

chapter("killed")
manager = SandboxManagerSync.create()
try:
    manager.get_sandbox_info(sandbox.id)
    raise AssertionError("a killed sandbox still answers")
except Exception as e:  # noqa: BLE001  (the SDK's own class, by status)
    assert getattr(e, "status_code", None) == 404, repr(e)
manager.close()
print(f"{runtime}: the end")
