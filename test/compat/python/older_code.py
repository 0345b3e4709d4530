"""What a program written for an older release of the official code interpreter
SDK does: the methods of 0.1.2, unmodified.

Usage: older_code.py RUNTIME; else as story.py.
"""

import asyncio
import sys
import threading
from datetime import timedelta

from code_interpreter import CodeInterpreter, CodeInterpreterSync, SupportedLanguage
from opensandbox import Sandbox, SandboxSync
from opensandbox.exceptions import SandboxException
from opensandbox.models.execd_sync import ExecutionHandlersSync

runtime = sys.argv[1]
where = {
    "entrypoint": ["/opt/opensandbox/code-interpreter.sh"],  # its place before June 2026
    "timeout": timedelta(minutes=10),
    "extensions": {"sandboxd.runtime": runtime},
    "resource": {"cpu": "1", "memory": "512Mi"},
}


def chapter(name: str) -> None:
    print(f"older-code-{runtime}: {name}", flush=True)


def stdout(execution) -> str:
    return "".join(m.text for m in execution.logs.stdout)


chapter("create")
sandbox = SandboxSync.create("opensandbox/code-interpreter:latest", **where)
interpreter = CodeInterpreterSync.create(sandbox=sandbox)
assert interpreter.id == sandbox.id
codes = interpreter.codes

chapter("contexts")
c, other = codes.create_context(SupportedLanguage.PYTHON), codes.create_context(SupportedLanguage.PYTHON)
assert codes.get_context(c.id).language == "python"
assert {x.id for x in codes.list_contexts("python")} == {c.id, other.id}
codes.delete_context(other.id)
try:
    codes.get_context(other.id)
    raise AssertionError("a context that was deleted is there")
except SandboxException:
    pass

chapter("code")
e = codes.run("print('one')\nprint('two')\nx = 2 + 2\nx", context=c)
assert e.error is None and e.result[0].text == "4" and stdout(e) == "one\ntwo\n" and e.id == c.id, e
assert codes.run("x + 1", context=c).result[0].text == "5"
e = codes.run("1 / 0", context=c)
assert e.error.name == "ZeroDivisionError" and e.error.traceback, e.error
assert stdout(codes.run("echo from bash", language=SupportedLanguage.BASH)) == "from bash\n"
assert codes.run("6 * 7").result[0].text == "42"

chapter("interrupt")
began, ends = threading.Event(), []
h = ExecutionHandlersSync(on_stdout=lambda m: began.set())
t = threading.Thread(target=lambda: ends.append(codes.run("print('go')\nwhile True: pass", context=c, handlers=h)))
t.start()
assert began.wait(30)
codes.interrupt(c.id)
t.join(30)
assert ends and ends[0].error.name == "KeyboardInterrupt", ends
assert codes.run("x", context=c).result[0].text == "4"
codes.delete_contexts("python")
assert codes.list_contexts("python") == []
sandbox.kill()
sandbox.close()


async def asynchronous() -> None:
    sandbox = await Sandbox.create("opensandbox/code-interpreter:latest", **where)
    codes = (await CodeInterpreter.create(sandbox=sandbox)).codes
    both = await asyncio.gather(*[codes.create_context(SupportedLanguage.JAVASCRIPT) for _ in range(2)])
    values = await asyncio.gather(*[codes.run(f"await Promise.resolve({i})", context=c) for i, c in enumerate(both)])
    assert [e.result[0].text for e in values] == ["0", "1"], values
    await sandbox.kill()
    await sandbox.close()


chapter("asynchronous")
asyncio.run(asynchronous())
chapter("the end")
