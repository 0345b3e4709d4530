"""Every tool of the official MCP server, unmodified, called by a real MCP
client over stdio.

Usage: mcp_tools.py RUNTIME. The daemon is named by OPEN_SANDBOX_DOMAIN and
OPEN_SANDBOX_API_KEY; report.py says what it writes where.
"""

import asyncio
import os
import sys
import time
import traceback
from contextlib import asynccontextmanager
from pathlib import Path

from mcp import ClientSession, StdioServerParameters
from mcp.client.stdio import stdio_client

from report import Report

runtime = sys.argv[1]
me = f"mcp-{runtime}"
report = Report(me)
SERVER = StdioServerParameters(command=str(Path(sys.executable).with_name("opensandbox-mcp")), env=dict(os.environ))
# Release 1.1.1 never answers again once the daemon refused something: the SDK
# raises errors that are their own cause, and the rich tracebacks of the server's
# log follow causes without end. Its log is a plain one where a refusal is to come.
PLAIN = "import logging; logging.basicConfig(); from opensandbox_mcp.__main__ import main; main()"
PLAIN_SERVER = StdioServerParameters(command=sys.executable, args=["-c", PLAIN], env=dict(os.environ))
WHERE = {"extensions": {"sandboxd.runtime": runtime}, "resource": {"cpu": "1", "memory": "256Mi"}}


class ToolFailed(Exception):
    """The server said that a tool failed. It says which, and keeps the reason to its log."""


async def main(session: ClientSession, plain: ClientSession) -> None:
    async def call(tool: str, at=session, **arguments):
        answer = await at.call_tool(tool, arguments)
        if answer.is_error:
            raise ToolFailed(" ".join(c.text for c in answer.content))
        report.called(tool)
        content = answer.structured_content
        return content["result"] if set(content) == {"result"} else content

    async def fails(tool: str, **arguments) -> str:
        try:
            await call(tool, at=plain, **arguments)
        except ToolFailed as e:
            return str(e)
        raise AssertionError(f"{tool} did not fail")

    async def until(what, ask, ok):
        end = time.monotonic() + 30
        while not ok(got := await ask()):
            assert time.monotonic() < end, f"{what}: still {got!r}"
            await asyncio.sleep(0.05)

    for s in (session, plain):
        await s.initialize()
    report.rows.update(t.name for t in (await session.list_tools()).tools)

    with report.chapter("sandboxes"):
        made = await call("sandbox_create", image="base", env={"GREETING": "hello"}, metadata={"program": me}, **WHERE)
        sid = made["sandbox_id"]
        assert made["info"]["status"]["state"] == "Running", made
        assert (await call("sandbox_get_info", sandbox_id=sid))["metadata"] == {"program": me}
        listed = await call("sandbox_list", filter={"states": ["Running"], "metadata": {"program": me}})
        assert [i["id"] for i in listed["sandbox_infos"]] == [sid], listed
        assert (await call("sandbox_healthcheck", sandbox_id=sid))["healthy"] is True
        metrics = await call("sandbox_get_metrics", sandbox_id=sid)
        assert 0 < metrics["memory_used_in_mib"] <= metrics["memory_total_in_mib"] <= 260, metrics
        assert (await call("sandbox_get_endpoint", sandbox_id=sid, port=8000))["endpoint"].endswith("/8000")
        before = (await call("sandbox_get_info", sandbox_id=sid))["expires_at"]
        assert (await call("sandbox_renew", sandbox_id=sid, timeout_seconds=3600))["expires_at"] > before
        assert "sandbox_create" in await fails("sandbox_create", image="no-such-image")
        assert "sandbox_connect" in await fails("sandbox_connect", sandbox_id="no-such-sandbox")
        assert (await call("sandbox_connect", sandbox_id=sid))["sandbox_id"] == sid

    with report.chapter("commands"):
        e = await call("command_run", sandbox_id=sid, command="echo $GREETING; pwd; exit 7", working_directory="/var")
        assert "".join(m["text"].strip() + "\n" for m in e["logs"]["stdout"]) == "hello\n/var\n", e
        assert e["exit_code"] == 7, e
        e = await call("command_run", sandbox_id=sid, command="echo $$ >/tmp/pid; exec sleep 1000", background=True)
        await call("command_interrupt", sandbox_id=sid, execution_id=e["id"])
        gone = lambda: call("command_run", sandbox_id=sid, command="kill -0 $(cat /tmp/pid)")  # noqa: E731
        await until("a command after interrupt", gone, lambda e: e["exit_code"] != 0)

    with report.chapter("files"):
        await call("file_create_directories", sandbox_id=sid, entries=[{"path": "/work/data", "mode": 750}])
        await call("file_write", sandbox_id=sid, path="/work/data/a.txt", content="häl\nlo\n", mode=640)
        assert (await call("file_read", sandbox_id=sid, path="/work/data/a.txt"))["content"] == "häl\nlo\n"
        part = await call("file_read", sandbox_id=sid, path="/work/data/a.txt", range_header="bytes=5-6")
        assert part["content"] == "lo", part
        found = await call("file_search", sandbox_id=sid, path="/work", pattern="*.txt")
        assert [(f["path"], f["mode"]) for f in found] == [("/work/data/a.txt", 640)], found
        entries = [{"path": "/work/data/a.txt", "old_content": "l", "new_content": "L"}]
        assert (await call("file_replace_contents", sandbox_id=sid, entries=entries))[0]["replaced_count"] == 2
        entries = [{"source": "/work/data/a.txt", "destination": "/work/b.txt"}]
        await call("file_move", sandbox_id=sid, entries=entries)
        assert (await call("file_read", sandbox_id=sid, path="/work/b.txt"))["content"] == "häL\nLo\n"
        await call("file_delete", sandbox_id=sid, paths=["/work/b.txt"])
        await call("file_delete_directories", sandbox_id=sid, paths=["/work"])
        assert "file_read" in await fails("file_read", sandbox_id=sid, path="/work/b.txt", connect_if_missing=True)

    with report.chapter("network policy", "sandbox_create(network_policy: addresses)"):
        deny = {"default_action": "deny", "egress": [{"action": "allow", "target": "203.0.113.0/24"}]}
        other = (await call("sandbox_create", image="base", network_policy=deny, **WHERE))["sandbox_id"]
        e = await call("command_run", sandbox_id=other, command="curl -sS -m 5 http://198.51.100.1/")
        assert e["exit_code"] == 7, e  # could not connect: refused at once
        await call("sandbox_kill", sandbox_id=other)

    with report.chapter("policies by name", "sandbox_create(network_policy: names)"):
        named = {"default_action": "deny", "egress": [{"action": "allow", "target": "pypi.org"}]}
        other = (await call("sandbox_create", image="base", network_policy=named, **WHERE))["sandbox_id"]
        e = await call("command_run", sandbox_id=other, command="curl -sS -m 9 http://pypi.org/")
        assert e["exit_code"] == 0 and "this is pypi.org" in str(e), e
        e = await call("command_run", sandbox_id=other, command="curl -sS -m 9 http://www.example.com/")
        assert e["exit_code"] == 6, e  # could not resolve: refused at once
        await call("sandbox_kill", sandbox_id=other)

    with report.chapter("the end of sandboxes"):
        assert (await call("sandbox_kill", sandbox_id=sid))["status"] == "killed"
        assert "sandbox_get_info" in await fails("sandbox_get_info", sandbox_id=sid)
        assert "not found in local registry" in await fails("command_run", sandbox_id="no-such-sandbox", command="true")
    report.write()


@asynccontextmanager
async def connected(server: StdioServerParameters):
    async with stdio_client(server) as (read, write), ClientSession(read, write) as session:
        yield session


async def connect() -> None:
    async with connected(SERVER) as session, connected(PLAIN_SERVER) as plain:
        try:
            await main(session, plain)
        except BaseException:  # said now: to end the servers may take a while
            traceback.print_exc()
            raise


asyncio.run(connect())
