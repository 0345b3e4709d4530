"""Every method of the official Python SDK, unmodified, in both its flavours.

Usage: sdk.py sync|async RUNTIME. The daemon is named by OPEN_SANDBOX_DOMAIN
and OPEN_SANDBOX_API_KEY, as the SDK's own documentation says; report.py says
what it writes where.
"""

import asyncio
import os
import sys
import time
from datetime import datetime, timedelta, timezone

import httpx
import opensandbox
from opensandbox.config import ConnectionConfig, ConnectionConfigSync
from opensandbox.exceptions import SandboxApiException
from opensandbox.models.execd import RunCommandOpts
from opensandbox.models.filesystem import (
    ContentReplaceEntry,
    DirectoryListEntry,
    MoveEntry,
    SearchEntry,
    SetPermissionEntry,
    WriteEntry,
)
from opensandbox.models.isolated import CreateIsolatedSessionRequest, IsolatedWorkspaceSpec
from opensandbox.models.sandboxes import (
    PVC,
    CredentialProxyConfig,
    LifecycleHook,
    NetworkPolicy,
    NetworkRule,
    PlatformSpec,
    SandboxFilter,
    SandboxLifecycle,
    SnapshotFilter,
    Volume,
)
from opensandbox.models.templates import CreateTemplateRequest, TemplateFilter
from opensandbox.services.command import Commands
from opensandbox.services.diagnostics import Diagnostics
from opensandbox.services.egress import CredentialVault
from opensandbox.services.filesystem import Filesystem
from opensandbox.services.isolated import IsolationService, IsolationSession
from opensandbox.services.metrics import Metrics

from flavours import handlers
from report import Report, Watched

flavour, runtime = sys.argv[1:]
SYNC = flavour == "sync"
me = f"python-{flavour}-{runtime}"
report = Report(me)

SERVICES = {
    "Sandbox.commands": Commands,
    "Sandbox.files": Filesystem,
    "Sandbox.metrics": Metrics,
    "Sandbox.credential_vault": CredentialVault,
    "Sandbox.diagnostics": Diagnostics,
    "Sandbox.isolation": IsolationService,
}
RESULTS = {  # what comes back from these calls is watched, too
    "Sandbox.create": "Sandbox",
    "Sandbox.connect": "Sandbox",
    "Sandbox.resume": "Sandbox",
    "Sandbox.create_from_template": "Sandbox",
    "Sandbox.files_with_identity": "Sandbox.files_with_identity()",
    "Sandbox.isolation.create": "IsolationSession",
    "SandboxManager.create": "SandboxManager",
    "SandboxPool.acquire": "Sandbox",
}


def watched(sync_class, async_class, name):
    it = sync_class if SYNC else async_class
    if isinstance(it, type):
        report.surface(name, it)
    return Watched(report, it, name, set(SERVICES), RESULTS)


for name, interface in SERVICES.items():
    report.surface(name, interface)
report.surface("IsolationSession", IsolationSession)
Sandbox = watched(opensandbox.SandboxSync, opensandbox.Sandbox, "Sandbox")
SandboxManager = watched(opensandbox.SandboxManagerSync, opensandbox.SandboxManager, "SandboxManager")

WHERE = {"extensions": {"sandboxd.runtime": runtime}, "resource": {"cpu": "1", "memory": "256Mi"}}
DENY = NetworkPolicy(default_action="deny", egress=[NetworkRule(action="allow", target="203.0.113.0/24")])
MINE = {"program": me}


async def collect(stream) -> bytes:
    if SYNC:
        return b"".join(stream)
    return b"".join([chunk async for chunk in stream])


async def until(what: str, ask, ok, limit: float = 30):
    """Asks until the answer is as it should be: states come by polling in this protocol."""
    end = time.monotonic() + limit
    while True:
        answer = await ask()
        if ok(answer):
            return answer
        assert time.monotonic() < end, f"{what}: still {answer!r} after {limit} s"
        await asyncio.sleep(0.05)


async def refused(status: int, call) -> SandboxApiException:
    try:
        await call
    except SandboxApiException as e:
        assert e.status_code == status, repr(e)
        return e
    raise AssertionError(f"expected a refusal with {status}")


async def lifecycle(s) -> None:
    with report.chapter("create and look"):
        await s.check_ready(timedelta(seconds=30), timedelta(milliseconds=50))
        assert await s.is_healthy()
        info = await s.get_info()
        assert info.id == s.id and info.status.state == "Running", info
        assert info.entrypoint == ["tail", "-f", "/dev/null"] and info.metadata == MINE, info
        assert (info.platform.os, info.platform.arch) == ("linux", "amd64"), info
        assert info.extensions["sandboxd.runtime"] == runtime, info
        again = await Sandbox.connect(s.id)
        assert (await again.commands.run("echo $GREETING")).text == "hello"
        await again.close()
        for m in (await s.get_metrics(), await s.metrics.get_metrics(s.id)):
            assert 0 < m.memory_used_in_mib <= m.memory_total_in_mib <= 260 and m.cpu_count >= 1, m
        at = await s.get_endpoint(8000)
        assert at.endpoint.endswith("/8000") and "://" not in at.endpoint, at
        await refused(404, Sandbox.connect("no-such-sandbox"))
        await refused(404, Sandbox.create("no-such-image", **WHERE))

    with report.chapter("renew and relabel"):
        renewed = await s.renew(timedelta(hours=1))
        assert (await s.get_info()).expires_at == renewed.expires_at
        assert abs(renewed.expires_at - datetime.now(timezone.utc) - timedelta(hours=1)) < timedelta(minutes=1)
        assert (await s.patch_metadata({"step": "two"})).metadata == {**MINE, "step": "two"}
        assert (await s.patch_metadata({"step": None})).metadata == MINE

    with report.chapter("signed endpoints", "Sandbox.get_signed_endpoint"):
        at = await s.get_signed_endpoint(8000, int(time.time()) + 600)
        assert at.endpoint, at

    with report.chapter("diagnostics"):
        for logs in (await s.get_diagnostic_logs("container"), await s.diagnostics.get_logs(s.id, "container")):
            assert (logs.sandbox_id, logs.kind, logs.scope, logs.delivery) == (s.id, "logs", "container", "inline"), logs
        for events in (await s.get_diagnostic_events("runtime"), await s.diagnostics.get_events(s.id, "runtime")):
            assert (events.kind, events.scope) == ("events", "runtime") and events.content, events
        await refused(400, s.get_diagnostic_logs("no-such-scope"))


async def commands(s) -> None:
    c = s.commands
    with report.chapter("commands"):
        e = await c.run("echo out; echo oops >&2; exit 7")
        assert e.text == "out" and "".join(m.text for m in e.logs.stderr).strip() == "oops", e
        assert e.exit_code == 7 and e.error.name == "CommandExecError" and e.error.value == "7", e
        e = await c.run(["printf", "%s|", "a b", "$HOME", ""])
        assert e.text == "a b|$HOME||" and e.exit_code == 0, e
        opts = RunCommandOpts(working_directory="/var", envs={"A": "é\nz"}, uid=65534, gid=65534)
        e = await c.run('pwd; id -u; id -g; printf %s "$A"', opts=opts)
        assert e.text == "/var\n65534\n65534\né\nz", e
        e = await c.run("sleep 60", opts=RunCommandOpts(timeout=timedelta(seconds=1)))
        assert e.error is not None and e.exit_code != 0, e
        events = []

        # The command waits for it, because both streams come by ways of their own. A
        # handler of the synchronous SDK cannot await, so it is called past the watch.
        def heard(text):
            events.append(text)
            return s._it.files.write_file(f"/tmp/heard-{text}", "x")

        await c.run(
            "echo a; until test -e /tmp/heard-a; do sleep 0.05; done; echo b >&2; exit 9",
            handlers=handlers(
                SYNC,
                on_init=lambda i: events.append(bool(i.id)),
                on_stdout=lambda m: heard(m.text.strip()),
                on_stderr=lambda m: events.append(m.text.strip()),
                on_error=lambda e: events.append(e.value),
                on_execution_complete=lambda _: events.append("complete"),
            ),
        )
        assert events == [True, "a", "b", "9"], events
        two = await asyncio.gather(c.run("sleep 0.2; echo 1"), c.run("echo 2"))
        assert [e.text for e in two] == ["1", "2"], two

    with report.chapter("background commands"):
        e = await c.run("echo one; echo two; exit 3", opts=RunCommandOpts(background=True))
        assert e.exit_code is None and e.id, e
        status = await until("a command that exits", lambda: c.get_command_status(e.id), lambda st: not st.running)
        assert status.exit_code == 3 and status.finished_at >= status.started_at, status
        logs = await c.get_background_command_logs(e.id)
        assert logs.content == "one\ntwo\n" and logs.cursor > 0, logs
        rest = await c.get_background_command_logs(e.id, logs.cursor)
        assert rest.content == "" and rest.cursor == logs.cursor, rest
        e = await c.run("sleep 1000", opts=RunCommandOpts(background=True))
        assert (await c.get_command_status(e.id)).running
        await c.interrupt(e.id)
        status = await until("a command after interrupt", lambda: c.get_command_status(e.id), lambda st: not st.running)
        assert status.exit_code != 0, status

    with report.chapter("variables that stay", "Sandbox.commands.set_env"):
        await c.set_env("KEPT", "it's a $HOME of \"quotes\"")
        await c.set_env("PLAIN", "x y")
        e = await c.run('printf %s "$PLAIN"')
        assert e.text == "x y", e

    with report.chapter(
        "sessions",
        "Sandbox.commands.create_session",
        "Sandbox.commands.run_in_session",
        "Sandbox.commands.delete_session",
    ):
        session = await c.create_session(working_directory="/var")
        e = await c.run_in_session(session, "export FOO=bar; cd /tmp; echo $PWD")
        assert e.text == "/tmp" and e.exit_code == 0, e
        assert (await c.run_in_session(session, "echo $FOO; pwd")).text == "bar\n/tmp"
        e = await c.run_in_session(session, "pwd; false", working_directory="/usr", timeout=timedelta(seconds=20))
        assert e.text == "/usr" and e.exit_code == 1, e
        await c.delete_session(session)
        await refused(404, c.run_in_session(session, "true"))


async def files(s) -> None:
    f = s.files
    with report.chapter("files"):
        await f.create_directories([WriteEntry(path="/work/data", mode=750)])
        await f.write_file("/work/data/a.txt", "häl\nlo\n", mode=640, owner="nobody", group="nogroup")
        blob = os.urandom(1 << 20)
        await f.write_files([WriteEntry(path="/work/data/b.bin", data=blob), WriteEntry(path="/work/data/c.txt", data="c")])
        assert await f.read_file("/work/data/a.txt") == "häl\nlo\n"
        assert await f.read_file("/work/data/a.txt", offset=2, limit=1) == "lo"
        assert await f.read_bytes("/work/data/b.bin", range_header="bytes=10-19") == blob[10:20]
        assert await collect(await f.read_bytes_stream("/work/data/b.bin")) == blob
        info = await f.get_file_info(["/work/data/a.txt", "/work/data"])
        a = info["/work/data/a.txt"]
        assert (a.mode, a.owner, a.group, a.entry_type, a.size) == (640, "nobody", "nogroup", "file", 8), a
        assert info["/work/data"].mode == 750 and info["/work/data"].entry_type == "directory", info
        await f.set_permissions([SetPermissionEntry(path="/work/data/a.txt", owner="root", group="root", mode=600)])
        a = (await f.get_file_info(["/work/data/a.txt"]))["/work/data/a.txt"]
        assert (a.mode, a.owner) == (600, "root"), a
        found = await f.search(SearchEntry(path="/work", pattern="*.txt"))
        assert sorted(e.path for e in found) == ["/work/data/a.txt", "/work/data/c.txt"], found
        await f.replace_contents([ContentReplaceEntry(path="/work/data/a.txt", old_content="lo", new_content="ll")])
        counted = await f.replace_contents_detailed(
            [ContentReplaceEntry(path="/work/data/a.txt", old_content="l", new_content="L")]
        )
        assert [(r.path, r.replaced_count) for r in counted] == [("/work/data/a.txt", 3)], counted
        assert await f.read_file("/work/data/a.txt") == "häL\nLL\n"
        await f.move_files([MoveEntry(src="/work/data/c.txt", dest="/work/moved/c.txt")])
        listed = [e.path for e in await f.list_directory(DirectoryListEntry(path="/work", depth=1))]
        assert listed == ["/work/data", "/work/moved"], listed
        await f.delete_files(["/work/moved/c.txt"])
        await f.delete_directories(["/work/data"])
        await refused(404, f.read_file("/work/data/a.txt"))
        assert not await f.search(SearchEntry(path="/work", pattern="*"))

    with report.chapter("files as somebody", "Sandbox.files_with_identity"):
        theirs = await s.files_with_identity(65534, 65534)
        await theirs.write_file("/tmp/theirs", "x")
        entry = (await f.get_file_info(["/tmp/theirs"]))["/tmp/theirs"]
        assert entry.owner == "nobody", entry
        await refused(403, theirs.read_file("/etc/shadow"))


async def network(s) -> None:
    with report.chapter("network policy", "Sandbox.create(network_policy=addresses)"):
        policy = await s.get_egress_policy()
        assert policy.default_action == "deny" and [r.target for r in policy.egress] == ["203.0.113.0/24"], policy

    with report.chapter("policy changes", "Sandbox.patch_egress_rules", "Sandbox.delete_egress_rules"):
        await s.patch_egress_rules([NetworkRule(action="allow", target="198.51.100.7")])
        policy = await s.get_egress_policy()
        assert [r.target for r in policy.egress] == ["198.51.100.7", "203.0.113.0/24"], policy
        await s.delete_egress_rules(["198.51.100.7", "never-was.example.com"])
        assert [r.target for r in (await s.get_egress_policy()).egress] == ["203.0.113.0/24"]

    with report.chapter("policies by name", "Sandbox.create(network_policy=names)"):
        named = NetworkPolicy(default_action="deny", egress=[NetworkRule(action="allow", target="*.example.com")])
        other = await Sandbox.create("base", network_policy=named, **WHERE)
        assert [r.target for r in (await other.get_egress_policy()).egress] == ["*.example.com"]

        async def get(name: str) -> tuple:
            ran = await other.commands.run(f"curl -sS -m 9 http://{name}/")
            return ran.exit_code, ran.text.strip()

        assert await get("www.example.com") == (0, "this is www.example.com")
        assert (await get("pypi.org"))[0] == 6  # could not resolve: refused at once
        await other.patch_egress_rules([NetworkRule(action="allow", target="pypi.org")])
        assert await get("pypi.org") == (0, "this is pypi.org")
        await other.delete_egress_rules(["*.example.com"])
        assert (await get("www.example.com"))[0] == 6
        await other.destroy()

    with report.chapter("credential vault", "Sandbox.create(credential_proxy=)", *(r for r in report.rows if "_vault." in r)):
        api = NetworkPolicy(default_action="deny", egress=[NetworkRule(action="allow", target="api.example.com")])
        proxied = await Sandbox.create("base", network_policy=api, credential_proxy=CredentialProxyConfig(enabled=True), **WHERE)
        vault = proxied.credential_vault
        await refused(404, vault.get())
        credentials = [{"name": "token", "source": {"value": "secret"}}]
        match = {"schemes": ["https"], "hosts": ["api.example.com"]}
        bindings = [{"name": "api", "match": match, "auth": {"type": "bearer", "credential": "token"}}]
        state = await vault.create(credentials=credentials, bindings=bindings)
        assert state.revision == 1, state
        await refused(409, vault.create(credentials=credentials, bindings=bindings))
        assert (await vault.get()).revision == 1
        assert (await vault.patch(expected_revision=1, credentials={"replace": credentials})).revision == 2
        await refused(409, vault.patch(expected_revision=1, credentials={"replace": credentials}))
        assert [c.name for c in await vault.list_credentials()] == ["token"]
        assert (await vault.get_credential("token")).source_type == "inline"
        assert [b.name for b in await vault.list_bindings()] == ["api"]
        assert (await vault.get_binding("api")).auth.type == "bearer"
        assert (await proxied.commands.run("cat $SSL_CERT_FILE")).exit_code == 0
        await vault.delete()
        await refused(404, vault.get())
        await proxied.destroy()
        await refused(412, s.credential_vault.create(credentials=credentials, bindings=bindings))


def status(endpoint: str, headers: dict[str, str] | None = None) -> int:
    return httpx.get(f"http://{endpoint}/", headers=headers).status_code


async def options() -> None:
    """Options of create that have a chapter, and a sandbox, of their own."""
    with report.chapter("secure access", "Sandbox.create(secure_access=)"):
        s = await Sandbox.create("base", secure_access=True, **WHERE)
        try:
            # Nothing listens there, which only those who are let in are told.
            at, signed = await s.get_endpoint(8000), await s.get_signed_endpoint(8000, int(time.time()) + 600)
            assert (status(at.endpoint), status(at.endpoint, at.headers), status(signed.endpoint)) == (401, 502, 502), (at, signed)
        finally:
            await s.destroy()

    with report.chapter("lifecycle hooks", "Sandbox.create(lifecycle=)"):
        hook = SandboxLifecycle(pre_start=LifecycleHook(command=["touch", "/tmp/before"], timeout_seconds=10))
        s = await Sandbox.create("base", lifecycle=hook, **WHERE)
        try:
            ran = await s.commands.run("test -e /tmp/before")
        finally:
            await s.destroy()
        assert ran.exit_code == 0, "the hook was taken and did not run"

    with report.chapter("volumes", "Sandbox.create(volumes=)"):
        volume = Volume(name="kept", pvc=PVC(claim_name=f"{me}-kept"), mount_path="/kept")
        s = await Sandbox.create("base", volumes=[volume], **WHERE)
        try:
            await s.files.write_file("/kept/file", "x")
        finally:
            await s.destroy()
        s = await Sandbox.create("base", volumes=[volume], **WHERE)
        try:
            assert await s.files.read_file("/kept/file") == "x"
        finally:
            await s.destroy()

    with report.chapter("templates", "Sandbox.create_from_template", *(r for r in report.rows if "_template" in r)):
        async def made(manager):
            template = await manager.create_template(CreateTemplateRequest(image="base", publish="s3://bucket/base"))
            assert (await manager.get_template(template.template_id)).image == "base"
            await manager.list_templates(TemplateFilter())
            await (await Sandbox.create_from_template(template.template_id, timeout=timedelta(minutes=5))).destroy()
            await manager.delete_template(template.template_id)

        manager = await SandboxManager.create()
        try:
            await made(manager)
        finally:
            await manager.close()


async def isolation(s) -> None:
    with report.chapter("isolation: what there is", "Sandbox.isolation.capabilities"):
        can = await s.isolation.capabilities()
        assert not can.available and can.message, can

    with report.chapter("isolated sessions", *(r for r in report.rows if "solation" in r and "capabilities" not in r)):
        request = CreateIsolatedSessionRequest(workspace=IsolatedWorkspaceSpec(path="/tmp", mode="rw"))
        session = await s.isolation.create(request)
        assert (await session.run("echo hi")).text == "hi"


async def administration(s) -> None:
    manager = await SandboxManager.create()
    with report.chapter("manager"):
        page = await manager.list_sandbox_infos(SandboxFilter(states=["RUNNING"], metadata=MINE, page=1, page_size=5))
        assert [i.id for i in page.sandbox_infos] == [s.id] and page.pagination.total_items == 1, page
        assert (await manager.get_sandbox_info(s.id)).id == s.id
        assert (await manager.patch_sandbox_metadata(s.id, {"by": "manager"})).metadata["by"] == "manager"
        renewed = await manager.renew_sandbox(s.id, timedelta(minutes=30))
        assert (await s.get_info()).expires_at == renewed.expires_at
        assert (await manager.get_diagnostic_logs(s.id, "container")).kind == "logs"
        assert (await manager.get_diagnostic_events(s.id, "runtime")).kind == "events"
        await refused(404, manager.get_sandbox_info("no-such-sandbox"))

    with report.chapter("pause and resume"):
        paused = "the sandbox after pause", lambda: s.get_info(), lambda i: i.status.state == "Paused"
        await s.pause()
        await until(*paused)
        assert not await s.is_healthy()
        resumed = await Sandbox.resume(s.id)
        assert (await resumed.commands.run("echo back")).text == "back"
        await resumed.close()
        await manager.pause_sandbox(s.id)
        await until(*paused)
        await refused(409, manager.pause_sandbox(s.id))
        await manager.resume_sandbox(s.id)
        await until("the sandbox after resume", lambda: s.get_info(), lambda i: i.status.state == "Running")

    with report.chapter("snapshots", "Sandbox.create(snapshot_id=)"):
        await s.commands.run("echo before >/root/kept")
        first = await s.create_snapshot(name=f"{me}-first")
        second = await manager.create_snapshot(s.id, f"{me}-second")
        assert (first.status.state, first.name, first.sandbox_id) == ("Creating", f"{me}-first", s.id), first
        for made in (first, second):
            now = await until("a snapshot", lambda: manager.get_snapshot(made.id), lambda i: i.status.state != "Creating")
            assert now.status.state == "Ready", now
        page = await manager.list_snapshots(SnapshotFilter(sandbox_id=s.id, states=["Ready"]))
        assert {i.id for i in page.snapshot_infos} == {first.id, second.id}, page
        restored = await Sandbox.create(snapshot_id=first.id, **WHERE)
        try:
            assert (await restored.commands.run("cat /root/kept")).text == "before"
        finally:
            await restored.destroy()
        for made in (first, second):
            await manager.delete_snapshot(made.id)
            await refused(404, manager.get_snapshot(made.id))
    await manager.close()


async def pools() -> None:
    store = opensandbox.InMemoryPoolStateStore() if SYNC else opensandbox.InMemoryAsyncPoolStateStore()
    config = ConnectionConfigSync() if SYNC else ConnectionConfig()
    spec = opensandbox.PoolCreationSpec(image="base", **WHERE)
    kind = opensandbox.SandboxPoolSync if SYNC else opensandbox.SandboxPoolAsync
    report.surface("SandboxPool", kind)
    report.surface("SandboxPoolManager", opensandbox.SandboxPoolManagerSync if SYNC else opensandbox.SandboxPoolManagerAsync)
    with report.chapter("pools"):
        made = kind(
            pool_name=me,
            max_idle=0,
            state_store=store,
            connection_config=config,
            creation_spec=spec,
            warmup_concurrency=2,
            warmup_health_check_polling_interval=timedelta(milliseconds=50),
            idle_timeout=timedelta(minutes=5),
        )
        pool = watched(made, made, "SandboxPool")
        await pool.start()
        try:
            await pool.resize(1)
            await until("a pool of one", pool.snapshot, lambda p: p.idle_count == 1)
            assert len(await pool.snapshot_idle_entries()) == 1
            s = await pool.acquire(sandbox_timeout=timedelta(minutes=5), policy=opensandbox.AcquirePolicy.FAIL_FAST)
            try:
                assert (await s.commands.run("echo pool-ok")).text == "pool-ok"
            finally:
                await s.destroy()
            await until("a pool of one again", pool.snapshot, lambda p: p.idle_count == 1)
            await pool.shutdown(graceful=True)  # from here on nobody fills or empties it
            assert await pool.release_all_idle() == 1
            assert await pool.release_all_idle_parallel() == 0
        finally:
            await pool.shutdown(graceful=True)
        made = (opensandbox.SandboxPoolManagerSync if SYNC else opensandbox.SandboxPoolManagerAsync)(
            state_store=store, connection_config=config
        )
        destroyed = await watched(made, made, "SandboxPoolManager").destroy(me)
        assert destroyed.drained_idle_count == 0, destroyed


async def ends(s) -> None:
    with report.chapter("the end of sandboxes"):
        await s.kill()
        await s.close()
        manager = await SandboxManager.create()
        await refused(404, manager.get_sandbox_info(s.id))
        other = await Sandbox.create("base", timeout=None, **WHERE)
        assert (await other.get_info()).expires_at is None
        await manager.kill_sandbox(other.id)
        await refused(404, other.get_info())
        await refused(404, manager.kill_sandbox(other.id))
        await other.close()
        third = await Sandbox.create("base", skip_health_check=True, **WHERE)
        await third.destroy()
        await manager.close()


async def main() -> None:
    s = await Sandbox.create(
        "base",
        timeout=timedelta(minutes=10),
        env={"GREETING": "hello"},
        metadata=MINE,
        platform=PlatformSpec(os="linux", arch="amd64"),
        resource_requests={"cpu": "100m"},
        network_policy=DENY,
        **WHERE,
    )
    for part in (lifecycle, commands, files, network, isolation, administration):
        await part(s)
    await options()
    await pools()
    await ends(s)
    report.write()


asyncio.run(main())
