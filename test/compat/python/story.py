"""One user's afternoon with the official OpenSandbox SDK, unmodified.

Usage: story.py RUNTIME. The daemon is named by OPEN_SANDBOX_DOMAIN and
OPEN_SANDBOX_API_KEY, as the SDK's own documentation says. Prints one line for
each chapter; an assertion that fails ends it.
"""

import asyncio
import hashlib
import os
import sys
import time
import urllib.error
import urllib.request
from datetime import timedelta

from opensandbox import Sandbox, SandboxSync
from opensandbox.models.execd import RunCommandOpts
from opensandbox.models.execd_sync import ExecutionHandlersSync
from opensandbox.models.filesystem import (
    ContentReplaceEntry,
    DirectoryListEntry,
    MoveEntry,
    SearchEntry,
    SetPermissionEntry,
    WriteEntry,
)
from opensandbox.models.sandboxes import NetworkPolicy, NetworkRule, SandboxFilter, SnapshotFilter
from opensandbox.sync.manager import SandboxManagerSync

runtime = sys.argv[1]


def chapter(name: str) -> None:
    print(f"{runtime}: {name}", flush=True)


def stdout(execution) -> str:
    """The output, as `$(…)` has it. Since 1.1.1 a text has its line's ending."""
    assert all(m.text.endswith(("\n", "\r")) for m in execution.logs.stdout[:-1]), execution.logs.stdout
    return "".join(m.text for m in execution.logs.stdout).rstrip("\n")


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
    assert [m.text for m in e.logs.stderr] == ["oops\n"], e
    assert e.text == "hello", e.text
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

    chapter("streaming")
    events = []

    def heard(text):  # the command waits for it: as it comes, not at the end
        events.append(text)
        sandbox.files.write_file("/tmp/heard-" + text.split()[-1], "x")

    handlers = ExecutionHandlersSync(
        on_init=lambda i: events.append("init"),
        on_stdout=lambda m: heard(m.text),
        on_stderr=lambda m: heard("err " + m.text),
        on_execution_complete=lambda c: events.append("complete"),
        on_error=lambda e: events.append("error " + e.value),
    )
    wait = "until test -e /tmp/heard-%s; do sleep 0.05; done"
    sandbox.commands.run(f"echo a; {wait % 'a'}; echo b >&2; {wait % 'b'}; echo c", handlers=handlers)
    assert events == ["init", "a\n", "err b\n", "c\n", "complete"], events
    events.clear()
    sandbox.commands.run("echo x; exit 9", handlers=handlers)
    assert events[-1] == "error 9", events
    e = sandbox.commands.run("id -u; id -g; touch /root/x", opts=RunCommandOpts(uid=65534, gid=65534))
    assert stdout(e) == "65534\n65534" and e.exit_code != 0, e

    chapter("background")
    e = sandbox.commands.run("for i in 1 2 3; do echo tick $i; done; exit 3", opts=RunCommandOpts(background=True))
    while (status := sandbox.commands.get_command_status(e.id)).running:
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

    chapter("set_env")
    for value in ["bar-1", "cost $5 ${HOME} tail", "line1\nline2", "a=b=c", "it's \"fine\" \\ \t.", ""]:
        sandbox.commands.set_env("STORY", value)
        sandbox.commands.run('printf %s "$STORY" >/tmp/story')
        assert sandbox.files.read_file("/tmp/story") == value, (value, sandbox.files.read_file("/tmp/story"))
    shell = sandbox.commands.create_session()
    sandbox.commands.set_env("STORY", "later")
    assert stdout(sandbox.commands.run_in_session(shell, "echo [$STORY]")) == "[]"  # sessions have what was there
    assert stdout(sandbox.commands.run("echo [$STORY]")) == "[later]"
    sandbox.commands.delete_session(shell)

    chapter("sessions")
    shell = sandbox.commands.create_session(working_directory="/srv/made/for it")
    run = lambda command, **more: sandbox.commands.run_in_session(shell, command, **more)
    e = run("pwd; A=1; export B=2; f() { echo f$1; }; alias g='echo g'; sleep 300 &")
    assert stdout(e) == "/srv/made/for it" and e.exit_code == 0 and e.id == shell, e
    e = run("echo $A$B; f 3; g; jobs -p | wc -l; echo oops >&2; cd /usr")
    assert stdout(e).split() == ["12", "f3", "g", "1"] and [m.text.strip() for m in e.logs.stderr] == ["oops"], e
    assert stdout(run("pwd", working_directory="/var")) == "/var"
    assert stdout(run("pwd")) == "/usr"
    e = run("A=5; exit 7")
    assert e.exit_code == 7 and e.error.name == "CommandExecError", e
    e = run("sleep 60", timeout=timedelta(seconds=1))
    assert e.error is not None and e.exit_code == -1 and "timed out" in e.error.traceback[-1], e
    e = run("if")  # no syntax at all
    assert e.exit_code == 2, e
    assert stdout(run("echo __EXIT_CODE__:3; echo $A; f 4; pwd; set -e; false")).split() == ["__EXIT_CODE__:3", "5", "f4", "/usr"]
    assert stdout(run("set +e; exec >/dev/null")) == "" and run("echo lost; (exit 4)").exit_code == 4
    sandbox.commands.delete_session(shell)
    try:
        run("true")
        raise AssertionError("a deleted session still runs")
    except Exception as e:  # noqa: BLE001  (the SDK's own class, by status)
        assert getattr(e, "status_code", None) == 404, repr(e)
    e = sandbox.commands.run("cat /proc/[0-9]*/stat | grep -c '^[0-9]* (sleep) [^ZX]'")
    assert stdout(e) == "0", e  # what it left in the background ended with it

    chapter("files")
    files = sandbox.files
    files.create_directories([WriteEntry(path="/work/data", mode=755)])
    files.write_file("/work/data/a.txt", "hällo\n", mode=644)
    assert files.read_file("/work/data/a.txt") == "hällo\n"
    blob = os.urandom(3 << 20)
    files.write_files([WriteEntry(path="/work/data/b.bin", data=blob), WriteEntry(path="/work/data/c.txt", data="c")])
    assert files.read_bytes("/work/data/b.bin") == blob
    assert files.read_bytes("/work/data/b.bin", range_header="bytes=10-19") == blob[10:20]
    big = os.urandom(1 << 20) * 30
    files.write_file("/work/big.bin", big)
    digest, total = hashlib.sha256(), 0
    for chunk in files.read_bytes_stream("/work/big.bin"):
        digest.update(chunk)
        total += len(chunk)
    assert total == len(big) and digest.digest() == hashlib.sha256(big).digest(), total
    files.delete_files(["/work/big.bin"])
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
    sandbox.commands.run("head -c 32M /dev/zero >/dev/shm/held")
    assert sandbox.get_metrics().memory_used_in_mib > m.memory_used_in_mib + 24, (m, sandbox.get_metrics())
    sandbox.commands.run("rm /dev/shm/held")
    sandbox.commands.run(
        "mkdir -p /srv/www && echo served >/srv/www/index.html && cd /srv/www && exec python3 -m http.server --bind 127.0.0.1 8000",
        opts=RunCommandOpts(background=True),
    )
    at = sandbox.get_endpoint(8000)
    assert at.endpoint.endswith("/8000"), at
    body = None
    while body is None:
        try:
            request = urllib.request.Request(f"http://{at.endpoint}/index.html", headers=at.headers or {})
            with urllib.request.urlopen(request, timeout=5) as answer:
                body = answer.read()
        except urllib.error.HTTPError as refused:  # 502 until the server listens
            assert refused.code == 502, refused
            time.sleep(0.05)
    assert body == b"served\n", body
    # On a loopback listener ports of apps are open; the agent's never is.
    try:
        urllib.request.urlopen(f"http://{sandbox.get_endpoint(44772).endpoint}/ping", timeout=5)
        raise AssertionError("the agent answers without its token")
    except urllib.error.HTTPError as refused:
        assert refused.code == 401, refused

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
    while sandbox.get_info().status.state == "Pausing":
        time.sleep(0.05)
    assert sandbox.get_info().status.state == "Paused"
    assert not sandbox.is_healthy()
    resumed = SandboxSync.resume(sandbox.id)
    assert stdout(resumed.commands.run("echo back")) == "back"
    resumed.close()

    chapter("snapshots")
    sandbox.commands.run("mkdir -p /srv/kept; echo before >/srv/kept/file; chmod 4711 /srv/kept/file")
    snapshot = sandbox.create_snapshot(name="before " + runtime)
    assert snapshot.status.state == "Creating" and snapshot.status.reason == "snapshot_accepted", snapshot
    assert snapshot.sandbox_id == sandbox.id and snapshot.name == "before " + runtime, snapshot
    with SandboxManagerSync.create() as snapshots:
        while (now := snapshots.get_snapshot(snapshot.id)).status.state == "Creating":
            time.sleep(0.05)
        assert now.status.state == "Ready" and now.status.last_transition_at >= now.created_at, now
        listed = snapshots.list_snapshots(SnapshotFilter(sandbox_id=sandbox.id, states=["Ready"]))
        assert [s.id for s in listed.snapshot_infos] == [snapshot.id] and listed.pagination.total_items == 1, listed
        sandbox.commands.run("echo after >/srv/kept/file")
        restored = SandboxSync.create(
            snapshot_id=snapshot.id,
            timeout=timedelta(minutes=5),
            resource={"cpu": "1", "memory": "512Mi"},
            extensions={"sandboxd.runtime": "runc" if runtime == "runsc" else "runsc"},
        )
        try:
            e = restored.commands.run("cat /srv/kept/file; stat -c %a /srv/kept/file")
            assert stdout(e).split() == ["before", "4711"], stdout(e)
            snapshots.delete_snapshot(snapshot.id)
            assert stdout(restored.commands.run("cat /srv/kept/file")) == "before"
        finally:
            restored.kill()
            restored.close()
        try:
            snapshots.get_snapshot(snapshot.id)
            raise AssertionError("a deleted snapshot still answers")
        except Exception as e:  # noqa: BLE001  (the SDK's own class, by status)
            assert getattr(e, "status_code", None) == 404, repr(e)

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


async def asynchronous() -> None:
    sandbox = await Sandbox.create(
        "python", timeout=timedelta(minutes=5), resource={"cpu": "1", "memory": "256Mi"}, extensions={"sandboxd.runtime": runtime}
    )
    try:
        both = await asyncio.gather(sandbox.commands.run("sleep 0.2; echo 1"), sandbox.commands.run("echo 2"))
        assert [stdout(e) for e in both] == ["1", "2"], both
    finally:
        await sandbox.kill()
        await sandbox.close()


chapter("asynchronous")
asyncio.run(asynchronous())
print(f"{runtime}: the end")
