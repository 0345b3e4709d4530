"""Every method of the official code interpreter SDK, unmodified, in both its
flavours, and each of its languages. What code may do besides is code.py's.

Usage: code_sdk.py sync|async RUNTIME; else as sdk.py.
"""

import asyncio
import sys
import threading
from datetime import timedelta

import code_interpreter
import opensandbox
from code_interpreter import SupportedLanguage as L
from code_interpreter.services.code import Codes
from opensandbox.exceptions import SandboxApiException

from flavours import handlers
from report import Report, Watched, settle

flavour, runtime = sys.argv[1:]
SYNC = flavour == "sync"
report = Report(f"code-{flavour}-{runtime}")

library = code_interpreter.CodeInterpreterSync if SYNC else code_interpreter.CodeInterpreter
report.surface("CodeInterpreter", library)
report.surface("CodeInterpreter.codes", Codes)
CodeInterpreter = Watched(
    report, library, "CodeInterpreter", {"CodeInterpreter.codes"}, {"CodeInterpreter.create": "CodeInterpreter"}
)

LANGUAGES = {
    # what one run leaves and another makes 42 of (to Go each is a program), and what says "go" and never ends
    L.PYTHON: ("kept = 40", "kept + 2", "print('go')\nwhile True: pass"),
    L.JAVASCRIPT: ("let kept = 40", "kept + 2", "console.log('go'); while (true);"),
    L.TYPESCRIPT: ("let kept: number = 40", "(kept as number) + 2", "const said: string = 'go'; console.log(said); while (true);"),
    L.JAVA: ("int kept = 40;", "kept + 2", 'System.out.println("go"); while (true);'),
    L.BASH: ("kept=40", "echo $((kept + 2))", "echo go; while :; do :; done"),
    L.GO: ("func main() {}", "func main() { println(40 + 2) }", 'import "fmt"\nfunc main() { fmt.Println("go"); for {} }'),
}


def out(execution, stream="stdout") -> str:
    return "".join(m.text for m in getattr(execution.logs, stream))


def beside(call) -> asyncio.Task:
    """A call that goes on while the program does, on a thread where it blocks."""
    return asyncio.create_task(asyncio.to_thread(asyncio.run, call) if SYNC else call)


async def refused(status: int, call) -> str:
    try:
        await call
    except SandboxApiException as e:
        assert e.status_code == status, repr(e)
        return str(e)
    raise AssertionError(f"expected a refusal with {status}")


async def close(interpreter) -> None:
    await (interpreter.close() if SYNC else interpreter.aclose())


async def create(sandbox):
    with report.chapter("create and look"):
        quick = await CodeInterpreter.create(sandbox=sandbox, skip_health_check=True)
        assert await quick.codes.ping()
        await close(quick)
        interpreter = await CodeInterpreter.create(sandbox=sandbox)
        assert interpreter.id == sandbox.id and interpreter.sandbox is sandbox
        assert interpreter.files is sandbox.files and interpreter.commands is sandbox.commands and interpreter.metrics is sandbox.metrics
        assert await interpreter.ping() and await interpreter.is_healthy()
        await interpreter.check_ready(timedelta(seconds=30), timedelta(milliseconds=50))
        return interpreter


async def contexts(codes) -> None:
    with report.chapter("contexts"):
        a, b, other = [await codes.create_context(language) for language in (L.PYTHON, L.PYTHON, L.BASH)]
        assert a.id and a.id != b.id and (a.language, other.language) == (L.PYTHON, L.BASH), (a, b, other)
        assert await codes.get_context(b.id) == b
        assert {c.id for c in await codes.list_contexts(L.PYTHON)} == {a.id, b.id}
        await codes.delete_context(b.id)
        await refused(404, codes.get_context(b.id))
        await refused(404, codes.delete_context(b.id))
        await refused(404, codes.run("1", context=b))
        await codes.delete_contexts(L.PYTHON)
        assert await codes.list_contexts(L.PYTHON) == []
        assert [c.id for c in await codes.list_contexts(L.BASH)] == [other.id]
        await codes.delete_contexts(L.BASH)
        assert "cobol" in await refused(400, codes.create_context("cobol"))


async def runs(codes) -> None:
    with report.chapter("runs"):
        c = await codes.create_context(L.PYTHON)
        e = await codes.run("import sys\nprint('ü'); print('oops', file=sys.stderr)\nx = 40\nx + 2", context=c)
        assert e.error is None and e.id == c.id and e.execution_count == 1 and e.complete is not None, e
        assert [r.text for r in e.result] == ["42"] and out(e) == "ü\n" and out(e, "stderr") == "oops\n", e
        e = await codes.run("x / 0", context=c)
        assert (e.error.name, e.error.value, e.execution_count, e.complete) == ("ZeroDivisionError", "division by zero", 2, None), e
        assert any("x / 0" in line for line in e.error.traceback), e.error
        events = []
        h = handlers(
            SYNC,
            on_init=lambda i: events.append(i.id),
            on_stdout=lambda m: events.append(m.text),
            on_stderr=lambda m: events.append(m.text),
            on_result=lambda r: events.append(r.text),
            on_error=lambda x: events.append(x.name),
            on_execution_complete=lambda x: events.append("complete"),
        )
        await codes.run("print(1)\n'end'", context=c, handlers=h)
        await codes.run("1 / 0", context=c, handlers=h)
        assert events == [c.id, "1\n", "'end'", "complete", c.id, "ZeroDivisionError"], events
        assert (await codes.run("y = 7", language=L.PYTHON)).error is None
        assert (await codes.run("y")).result[0].text == "7"  # no language is Python
        assert (await codes.run("y", context=c)).error.name == "NameError"
        # Each waits for the other: they overlap, or never end.
        d = await codes.create_context(L.PYTHON)
        await codes.run("import os; os.mkfifo('/tmp/f')", context=c)
        read = beside(codes.run("open('/tmp/f').read()", context=c))
        wrote = beside(codes.run("open('/tmp/f', 'w').write('met')", context=d))
        texts = [e.result[0].text for e in await asyncio.wait_for(asyncio.gather(read, wrote), 60)]
        assert texts == ["'met'", "3"], texts
        await codes.delete_contexts(L.PYTHON)


async def language(codes, name: str) -> None:
    leave, take, endless = LANGUAGES[name]
    with report.chapter(name, f"CodeInterpreter.codes.run({name})", f"CodeInterpreter.codes.interrupt({name})"):
        c = await codes.create_context(name)
        e = await codes.run(leave, context=c)
        assert e.error is None, e
        e = await codes.run(take, context=c)
        said = e.result[0].text if e.result else out(e) + out(e, "stderr")
        assert e.error is None and said.strip() == "42", e
        began, ids = threading.Event(), []
        h = handlers(SYNC, on_init=lambda i: ids.append(i.id), on_stdout=lambda m: began.set())
        running = beside(codes.run(endless, context=c, handlers=h))
        assert await asyncio.to_thread(began.wait, 60), "the code never said that it runs"
        assert "busy" in await refused(500, codes.run(take, context=c))
        await codes.interrupt(ids[0])
        e = await asyncio.wait_for(running, 30)
        assert e.error.name == ("CommandExecError" if name == L.BASH else "KeyboardInterrupt"), e.error
        assert (await codes.run(take, context=c)).error is None
        await codes.delete_context(c.id)


async def main() -> None:
    made = (opensandbox.SandboxSync if SYNC else opensandbox.Sandbox).create(
        "opensandbox/code-interpreter:v1.1.0",
        entrypoint=["/opt/code-interpreter/code-interpreter.sh"],
        timeout=timedelta(minutes=10),
        resource={"cpu": "1", "memory": "1Gi"},
        extensions={"sandboxd.runtime": runtime},
    )
    sandbox = await settle(made)
    try:
        interpreter = await create(sandbox)
        await contexts(interpreter.codes)
        await runs(interpreter.codes)
        for name in LANGUAGES:
            await language(interpreter.codes, name)
        await refused(500, interpreter.codes.interrupt("nobody"))
        with report.chapter("the end of an interpreter"):
            await close(interpreter)
            assert await settle(sandbox.is_healthy())  # the sandbox is another's to end
    finally:
        await settle(sandbox.kill())
        await settle(sandbox.close())
    report.write()


asyncio.run(main())
