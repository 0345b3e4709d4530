"""Every command of the official command line, `osb`, unmodified: what it prints
and how it exits.

Usage: osb.py RUNTIME. The daemon is named by OPEN_SANDBOX_DOMAIN and
OPEN_SANDBOX_API_KEY; report.py says what it writes where.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from datetime import datetime, timedelta, timezone
from pathlib import Path

import click
from opensandbox_cli.main import cli

from report import Report

runtime = sys.argv[1]
me = f"osb-{runtime}"
report = Report(me)
OSB = str(Path(sys.executable).with_name("osb"))
GROUPS = {}  # group of commands → its commands; `osb skills` installs prompts on the user's machine and speaks to no server


def walk(group: click.Group, name: str) -> None:
    for sub, command in group.commands.items():
        if isinstance(command, click.Group):
            if sub != "skills":
                walk(command, f"{name} {sub}")
        else:
            report.rows.add(f"{name} {sub}")
            GROUPS.setdefault(name, []).append(f"{name} {sub}")


walk(cli, "osb")

work = Path(os.environ["HOME"])  # the test's, and empty
os.environ.update(NO_COLOR="1", COLUMNS="200")


class Failed(Exception):
    """osb exited otherwise than it should; holds all that it said."""


def osb(*argv: str, code: int = 0, stdin: str = "") -> str:
    """Runs one command and returns its standard output; of one that is to fail, its standard error."""
    got, out, err = process(argv, stdin)
    if got != code:
        raise Failed(f"osb {' '.join(argv)}: exit {got}, want {code}; it said: {out} {err}")
    if code:
        assert err.strip(), f"osb {' '.join(argv)} failed without a word"
    words = "osb"
    for a in argv:
        words += " " + a
        if words in report.rows and not code:
            report.called(words)
    return err if code else out


def process(argv: tuple[str, ...], stdin: str) -> tuple[int, str, str]:
    """What the program osb does, in a process of its own, but for the second
    that importing it takes: exit status, standard output and error."""
    sys.stdout.flush()
    files = [tempfile.TemporaryFile() for _ in range(3)]
    files[0].write(stdin.encode())
    files[0].seek(0)
    pid = os.fork()
    if pid == 0:
        for fd, f in enumerate(files):
            os.dup2(f.fileno(), fd)
        signal.alarm(60)
        status = 99  # osb itself always says how it exits
        try:
            cli(argv, prog_name="osb")
        except SystemExit as e:
            status = e.code or 0
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    for f in files:
        f.seek(0)
    return status, files[1].read().decode(), files[2].read().decode()


def answer(*argv: str, code: int = 0, stdin: str = ""):
    """What osb says with -o json."""
    at = argv.index("--") if "--" in argv else len(argv)
    return json.loads(osb(*argv[:at], "-o", "json", *argv[at:], code=code, stdin=stdin))


def until(what: str, ask, ok):
    end = time.monotonic() + 30
    while time.monotonic() < end:
        got = ask()
        if ok(got):
            return got
        time.sleep(0.05)
    raise AssertionError(f"{what}: still {got!r}")


def write(name: str, value) -> str:
    (work / name).write_text(value if isinstance(value, str) else json.dumps(value))
    return str(work / name)


policy = write("policy.json", {"defaultAction": "deny", "egress": [{"action": "allow", "target": "203.0.113.0/24"}]})
WHERE = ["--extension", f"sandboxd.runtime={runtime}", "--resource", "cpu=1", "--resource", "memory=256Mi"]

with report.chapter("configuration"):
    osb("config", "init")
    osb("config", "set", "connection.domain", os.environ.pop("OPEN_SANDBOX_DOMAIN"))
    osb("config", "set", "connection.api_key", os.environ.pop("OPEN_SANDBOX_API_KEY"))
    osb("config", "set", "defaults.image", "base")
    subprocess.run([OSB, "--version"], check=True)
    shown = answer("config", "show")
    assert "base" in json.dumps(shown), shown

with report.chapter("sandboxes", "osb sandbox create --network-policy-file (addresses)"):
    made = answer(
        "sandbox", "create", "--timeout", "10m", "-e", "GREETING=hello", "-m", f"program={me}", "--network-policy-file", policy, *WHERE
    )
    sid = made["id"]
    assert made["status"] == "created" and made["image"] == "base", made
    listed = answer("sandbox", "list", "--state", "running", "-m", f"program={me}")
    assert [i["id"] for i in listed["items"]] == [sid], listed
    table = osb("sandbox", "list", "-m", f"program={me}")
    assert sid in table and "Running" in table, table
    got = answer("sandbox", "get", sid)
    assert got["status"]["state"] == "Running" and got["metadata"] == {"program": me}, got
    assert got["extensions"]["sandboxd.runtime"] == runtime, got
    assert answer("sandbox", "health", sid) == {"sandbox_id": sid, "healthy": True}
    metrics = answer("sandbox", "metrics", sid)
    assert 0 < metrics["memory_used_in_mib"] <= metrics["memory_total_in_mib"] <= 260, metrics
    endpoint = answer("sandbox", "endpoint", sid, "--port", "8000")
    assert endpoint["endpoint"].endswith("/8000"), endpoint
    renewed = answer("sandbox", "renew", sid, "--timeout", "1h")
    left = datetime.fromisoformat(renewed["expires_at"]) - datetime.now(timezone.utc)
    assert timedelta(minutes=59) < left < timedelta(minutes=61), renewed
    assert "no-such-sandbox" in osb("sandbox", "get", "no-such-sandbox", code=1)
    assert "no-such-image" in osb("sandbox", "create", "--image", "no-such-image", *WHERE, code=1)

with report.chapter("metrics as they come", "osb sandbox metrics --watch"):
    watch = subprocess.Popen([OSB, "sandbox", "metrics", sid, "--watch"], stdout=subprocess.PIPE, text=True)
    lines = [watch.stdout.readline() for _ in range(2)]
    watch.send_signal(signal.SIGINT)
    assert watch.wait(30) == 0, watch.returncode
    assert all("cpu=" in line and "MiB" in line for line in lines), lines

with report.chapter("commands"):
    assert osb("command", "run", sid, "--", "sh", "-c", "echo $GREETING") == "hello\n"
    assert osb("command", "run", sid, "--argv", "-w", "/var", "--", "pwd") == "/var\n"
    assert "CommandExecError: 7" in osb("command", "run", sid, "--", "sh", "-c", "exit 7", code=1)
    osb("command", "run", sid, "--timeout", "1s", "--", "sleep", "60", code=1)
    started = answer("command", "run", sid, "--background", "--", "sh", "-c", "echo one; exit 3")
    status = until("a command that exits", lambda: answer("command", "status", sid, started["execution_id"]), lambda s: not s["running"])
    assert status["exit_code"] == 3, status
    logs = answer("command", "logs", sid, started["execution_id"])
    assert logs["content"] == "one\n" and logs["cursor"] > 0, logs
    assert answer("command", "logs", sid, started["execution_id"], "--cursor", str(logs["cursor"]))["content"] == ""
    started = answer("command", "run", sid, "--background", "--", "sleep", "1000")
    osb("command", "interrupt", sid, started["execution_id"])
    until("a command after interrupt", lambda: answer("command", "status", sid, started["execution_id"]), lambda s: not s["running"])

with report.chapter("lines of a command's output", "osb command run (several lines)"):
    assert osb("command", "run", sid, "--", "sh", "-c", "echo a; echo b; printf c") == "a\nb\nc\n"

with report.chapter("sessions", *GROUPS["osb command session"]):
    session = answer("command", "session", "create", sid, "--workdir", "/var")["session_id"]
    assert osb("command", "session", "run", sid, session, "--", "pwd") == "/var\n"
    osb("command", "session", "run", sid, session, "--", "export", "FOO=bar")
    assert osb("command", "session", "run", sid, session, "--", "sh", "-c", "echo $FOO") == "bar\n"
    osb("command", "session", "delete", sid, session)

with report.chapter("files"):
    made = answer("file", "mkdir", sid, "/work/data", "/work/moved", "--mode", "750")
    assert [d["status"] for d in made] == ["created", "created"], made
    osb("file", "write", sid, "/work/data/a.txt", "-c", "häl\nlo\n", "--mode", "640", "--owner", "nobody", "--group", "nogroup")
    osb("file", "write", sid, "/work/data/c.txt", stdin="c")
    assert osb("file", "cat", sid, "/work/data/a.txt") == "häl\nlo\n"
    blob = os.urandom(1 << 20)
    (work / "blob").write_bytes(blob)
    osb("file", "upload", sid, str(work / "blob"), "/work/data/blob")
    osb("file", "download", sid, "/work/data/blob", str(work / "back" / "blob"))
    assert (work / "back" / "blob").read_bytes() == blob
    info = answer("file", "info", sid, "/work/data/a.txt")[0]
    assert (info["mode"], info["owner"], info["group"], info["size"]) == (640, "nobody", "nogroup", 8), info
    osb("file", "chmod", sid, "/work/data/a.txt", "--mode", "600", "--owner", "root", "--group", "root")
    assert answer("file", "info", sid, "/work/data/a.txt")[0]["mode"] == 600
    found = answer("file", "search", sid, "/work", "--pattern", "*.txt")
    assert sorted(f["path"] for f in found) == ["/work/data/a.txt", "/work/data/c.txt"], found
    osb("file", "replace", sid, "/work/data/a.txt", "--old", "lo", "--new", "LO")
    osb("file", "mv", sid, "/work/data/c.txt", "/work/moved/d.txt")
    assert osb("file", "cat", sid, "/work/moved/d.txt") == "c"
    assert osb("file", "cat", sid, "/work/data/a.txt") == "häl\nLO\n"
    osb("file", "rm", sid, "/work/moved/d.txt")
    osb("file", "rmdir", sid, "/work/data")
    assert "/work/data/a.txt" in osb("file", "cat", sid, "/work/data/a.txt", code=1)

with report.chapter("network policy"):
    got = answer("egress", "get", sid)
    assert got["default_action"] == "deny" and got["egress"][0]["target"] == "203.0.113.0/24", got

with report.chapter("policy changes", "osb egress patch"):
    osb("egress", "patch", sid, "--rule", "allow=198.51.100.7")
    targets = [r["target"] for r in answer("egress", "get", sid)["egress"]]
    assert targets == ["198.51.100.7", "203.0.113.0/24"], targets

with report.chapter("policies by name", "osb sandbox create --network-policy-file (names)"):
    named = write("named.json", {"defaultAction": "deny", "egress": [{"action": "allow", "target": "pypi.org"}]})
    other = answer("sandbox", "create", "--network-policy-file", named, *WHERE)["id"]
    assert [r["target"] for r in answer("egress", "get", other)["egress"]] == ["pypi.org"]
    assert "this is pypi.org" in osb("command", "run", other, "--", "curl", "-sS", "-m", "9", "http://pypi.org/")
    osb("egress", "patch", other, "--rule", "allow=*.example.com")
    assert "this is www.example.com" in osb("command", "run", other, "--", "curl", "-sS", "-m", "9", "http://www.example.com/")
    osb("sandbox", "kill", other)

vault = [c for g in GROUPS if "vault" in g for c in GROUPS[g]]
with report.chapter("credential vault", "osb sandbox create --credential-proxy", *vault):
    binding = {"name": "api", "match": {"hosts": ["api.example.com"]}, "auth": {"type": "bearer", "credential": "token"}}
    token = {"name": "token", "source": {"value": "secret"}}
    new = write("vault.json", {"credentials": [token], "bindings": [binding]})
    changes = write("changes.json", {"credentials": {"replace": [token]}})
    api = write("api.json", {"defaultAction": "deny", "egress": [{"action": "allow", "target": "api.example.com"}]})
    proxied = answer("sandbox", "create", "--network-policy-file", api, "--credential-proxy", *WHERE)["id"]
    osb("credential-vault", "create", proxied, "--file", new)
    assert answer("credential-vault", "get", proxied)["revision"] == 1
    osb("credential-vault", "patch", proxied, "--file", changes)
    for kind, name in (("credential", "token"), ("binding", "api")):
        assert name in osb("credential-vault", kind, "list", proxied)
        assert name in osb("credential-vault", kind, "get", proxied, name)
    osb("credential-vault", "delete", proxied)
    osb("sandbox", "kill", proxied)

with report.chapter("diagnostics"):
    logs = answer("diagnostics", "logs", sid, "--scope", "container")
    assert (logs["kind"], logs["delivery"]) == ("logs", "inline"), logs
    assert osb("diagnostics", "events", sid, "--scope", "runtime", "-o", "raw").strip()
    osb("diagnostics", "events", sid, "--scope", "no-such-scope", code=1)
    assert sid in osb("devops", "inspect", sid)
    assert osb("devops", "events", sid, "--limit", "5").strip()
    assert sid in osb("devops", "summary", sid)
    osb("devops", "logs", sid, "--tail", "5", "--since", "10m")

with report.chapter("pause and resume"):
    osb("sandbox", "pause", sid)
    until("a sandbox after pause", lambda: answer("sandbox", "get", sid), lambda s: s["status"]["state"] == "Paused")
    assert answer("sandbox", "health", sid)["healthy"] is False
    osb("sandbox", "resume", sid)
    assert osb("command", "run", sid, "--", "echo", "back") == "back\n"

with report.chapter("snapshots", "osb sandbox create --snapshot-id"):
    osb("command", "run", sid, "--", "sh", "-c", "echo before >/root/kept")
    snapshot = answer("snapshot", "create", sid, "--name", me)
    assert (snapshot["status"], snapshot["name"]) == ("Creating", me), snapshot
    until("a snapshot", lambda: answer("snapshot", "get", snapshot["id"]), lambda s: s["status"]["state"] == "Ready")
    listed = answer("snapshot", "list", "--sandbox-id", sid)
    assert [s["id"] for s in listed["items"]] == [snapshot["id"]], listed
    restored = answer("sandbox", "create", "--snapshot-id", snapshot["id"], *WHERE)["id"]
    assert osb("command", "run", restored, "--", "cat", "/root/kept") == "before\n"
    osb("sandbox", "kill", restored)
    osb("snapshot", "delete", snapshot["id"])
    osb("snapshot", "get", snapshot["id"], code=1)

with report.chapter("a request from a file", "osb sandbox create --file"):
    request = {
        "image": "base",
        "timeout": 600,
        "resourceLimits": {"cpu": "1", "memory": "256Mi"},
        "entrypoint": ["tail", "-f", "/dev/null"],
        "extensions": {"sandboxd.runtime": runtime},
    }
    other = answer("sandbox", "create", "--file", write("request.json", request))["id"]
    assert answer("sandbox", "get", other)["entrypoint"] == request["entrypoint"]

with report.chapter("lifecycle hooks", "osb sandbox create --file (lifecycle)"):
    hook = {"preStart": {"command": ["touch", "/tmp/before"]}}
    hooked = answer("sandbox", "create", "--file", write("hooked.json", {**request, "lifecycle": hook}))["id"]
    ran = osb("file", "search", hooked, "/tmp", "--pattern", "before")
    osb("sandbox", "kill", hooked)
    assert "/tmp/before" in ran, "the hook was taken and did not run"

with report.chapter("volumes", "osb sandbox create --volumes-file"):
    volumes = write("volumes.json", [{"name": "kept", "pvc": {"claimName": f"{me}-kept"}, "mountPath": "/kept"}])
    osb("sandbox", "kill", answer("sandbox", "create", "--volumes-file", volumes, *WHERE)["id"])

with report.chapter("templates", "osb sandbox create --template", *GROUPS["osb template"]):
    template = answer("template", "create", "--image", "base", "--publish", "s3://bucket/base")["template_id"]
    osb("template", "get", template)
    osb("template", "list")
    osb("sandbox", "kill", answer("sandbox", "create", "--template", template, "--timeout", "10m")["id"])
    osb("template", "delete", template)

with report.chapter("the end of sandboxes"):
    killed = answer("sandbox", "kill", sid, other)
    assert [k["status"] for k in killed] == ["terminated", "terminated"], killed
    osb("sandbox", "get", sid, code=1)
    assert answer("sandbox", "list", "-m", f"program={me}")["items"] == []

report.write()
