"""Code in contexts, with the official code interpreter SDK, unmodified.

Usage: code.py RUNTIME IMAGE. Prints one line for each chapter, as story.py does.
"""

import asyncio
import os
import random
import sys
import threading
import time
from datetime import timedelta

from code_interpreter import CodeInterpreter, CodeInterpreterSync, SupportedLanguage
from code_interpreter.models.code import SupportedLanguage as L
from opensandbox import Sandbox, SandboxSync
from opensandbox.exceptions import SandboxException
from opensandbox.models.execd import ExecutionHandlers
from opensandbox.models.execd_sync import ExecutionHandlersSync

runtime, image = sys.argv[1:]
OPTIONS = dict(timeout=timedelta(minutes=10), resource={"cpu": "1", "memory": "512Mi"}, extensions={"sandboxd.runtime": runtime})
if image == "code-interpreter":
    OPTIONS["entrypoint"] = ["/opt/code-interpreter/code-interpreter.sh"]


def chapter(name: str) -> None:
    print(f"{runtime}: {name}", flush=True)


def out(execution, stream="stdout") -> str:
    return "".join(m.text for m in getattr(execution.logs, stream))


def refused(call, *args, **kwargs) -> str:
    try:
        call(*args, **kwargs)
    except SandboxException as e:
        return str(e)
    raise AssertionError(f"{call} was not refused")


def plain(codes) -> None:
    chapter("python")
    c = codes.create_context(SupportedLanguage.PYTHON)
    assert c.id and c.language == "python", c
    e = codes.run("import sys\nprint(sys.version)\nresult = 2 + 2\nresult", context=c)
    assert e.error is None and e.result[0].text == "4" and out(e).startswith("3."), e
    assert e.id == c.id and e.execution_count == 1, e
    e = codes.run("result + 1", context=c)
    assert e.result[0].text == "5" and e.execution_count == 2 and e.complete is not None, e
    e = codes.run("import sys\nprint('o\\u2028\\x85ü'); print('e', file=sys.stderr); 1/0", context=c)
    assert e.error.name == "ZeroDivisionError" and e.error.value == "division by zero", e.error
    assert any("print('o" in line or "1/0" in line for line in e.error.traceback), e.error.traceback
    assert out(e) == "o\u2028\x85ü\n" and out(e, "stderr") == "e\n", e.logs
    e = codes.run("import asyncio\nawait asyncio.sleep(0.01)\n'awaited'", context=c)
    assert e.result[0].text == "'awaited'", e
    e = codes.run("input()", context=c)
    assert e.error.name == "EOFError", e.error

    chapter("contexts")
    other = codes.create_context(SupportedLanguage.PYTHON)
    assert codes.run("'result' in dir()", context=other).result[0].text == "False"
    assert {x.id for x in codes.list_contexts("python")} == {c.id, other.id}
    assert codes.get_context(other.id).language == "python"
    codes.delete_context(other.id)
    refused(codes.get_context, other.id)
    refused(codes.run, "1", context=other)
    assert "python" in refused(codes.create_context, "cobol")

    chapter("handlers")
    seen = []
    h = ExecutionHandlersSync(
        on_stdout=lambda m: seen.append(m.text), on_result=lambda r: seen.append(r.text),
        on_execution_complete=lambda x: seen.append("complete"), on_init=lambda x: seen.append("init"),
    )
    codes.run("for i in range(3): print(i)\n'end'", context=c, handlers=h)
    assert seen[0] == "init" and seen[-2:] == ["'end'", "complete"] and "".join(seen[1:-2]) == "0\n1\n2\n", seen

    chapter("interrupt")
    ids, started = [], threading.Event()
    h = ExecutionHandlersSync(on_init=lambda x: ids.append(x.id), on_stdout=lambda m: started.set())
    ends = []
    t = threading.Thread(target=lambda: ends.append(codes.run("kept = 7\nprint('go')\nimport time\ntime.sleep(300)", context=c, handlers=h)))
    t.start()
    assert started.wait(20)
    assert "busy" in refused(codes.run, "1", context=c)
    codes.interrupt(ids[0])
    t.join(20)
    assert ends and ends[0].error.name == "KeyboardInterrupt", ends
    assert codes.run("kept", context=c).result[0].text == "7"
    refused(codes.interrupt, "nobody")

    chapter("memory")
    for code in "x = bytearray(1 << 30)", "x = []\nwhile True: x.append(b'x' * (1 << 20))":
        e = codes.run(code, context=c)
        assert e.error.name == "MemoryError", e.error
    codes.run("del x", context=c)
    assert codes.run("kept", context=c).result[0].text == "7"

    chapter("bash")
    b = codes.create_context(SupportedLanguage.BASH)
    codes.run("x=5; cd /usr; f() { echo f $x; }; alias a='f aliased'", context=b)
    e = codes.run("a; pwd; echo err >&2", context=b)
    assert e.error is None and out(e) == "f 5\n/usr\n" and out(e, "stderr") == "err\n", e
    assert codes.run("exit 3", context=b).error.name == "ContextDied"

    chapter("by language")
    codes.run("y = 1", language=SupportedLanguage.PYTHON)
    assert codes.run("y", language=SupportedLanguage.PYTHON).result[0].text == "1"
    assert codes.run("y").result[0].text == "1"
    codes.delete_contexts("python")
    assert codes.list_contexts("python") == []
    assert codes.run("y").error.name == "NameError"


def pictures(codes) -> None:
    chapter("figures and frames")
    # Of results the SDK shows the text only: the rest is looked at as it came.
    import httpx

    def results(code):
        endpoint = sandbox.get_endpoint(44772)
        with httpx.stream("POST", f"http://{endpoint.endpoint}/code", headers=endpoint.headers, timeout=120,
                          json={"code": code, "context": {"language": "python"}}) as r:
            import json
            events = [json.loads(line.removeprefix("data:")) for line in r.iter_lines() if line.strip()]
        assert events[-1]["type"] == "execution_complete", events[-1]
        return [e["results"] for e in events if e["type"] == "result"]

    frame, = results("import pandas as pd, numpy as np\npd.DataFrame({'a': np.arange(3)})")
    assert "<table" in frame["text/html"] and '"data":[[0],[1],[2]]' in frame["application/json"] and "a\n" in frame["text/plain"], frame
    shown, value = results("import matplotlib.pyplot as plt\nplt.plot([1, 2]); plt.show(); 'after'")
    assert shown["image/png"].startswith("iVBOR") and "<svg" in shown["image/svg+xml"] and value["text"] == "'after'", value
    assert len(results("plt.plot([1, 2]);")) == 1


def nodes(codes) -> None:
    chapter("javascript and typescript")
    e = codes.run("const os = require('os'); let a = await Promise.resolve(40); console.log('js'); a + 2", language=SupportedLanguage.JAVASCRIPT)
    assert e.error is None and e.result[0].text == "42" and out(e) == "js\n", e
    e = codes.run("let a = 1; throw new Error('x')", language=SupportedLanguage.JAVASCRIPT)
    assert e.error.name == "Error" and e.error.value == "x", e
    e = codes.run("import { sep } from 'path'\ninterface P { x: number }\nconst p: P = { x: 6 }; p.x * 7", language=SupportedLanguage.TYPESCRIPT)
    assert e.error is None and e.result[0].text == "42", e


def java(codes) -> None:
    chapter("java")
    c = codes.create_context(SupportedLanguage.JAVA)
    e = codes.run('System.out.println("Calculating sum...");\nint a = 10;\nint b = 20;\nint sum = a + b;\nSystem.out.println("Sum: " + sum);\nsum', context=c)
    assert e.error is None and e.id == c.id and out(e) == "Calculating sum...\nSum: 30\n" and e.result[0].text == "30", e
    e = codes.run('System.err.println("ü"); sum + 1', context=c)
    assert out(e, "stderr") == "ü\n" and e.result[0].text == "31" and e.execution_count == 2, e
    e = codes.run("int f(int n) {\n  return 1 / n;\n}\nf(0)", context=c)
    assert e.error.name == "EvalException" and "ArithmeticException" in e.error.value and any("<cell 3>:2" in line for line in e.error.traceback), e.error
    e = codes.run("\nint nope = unknown;", context=c)
    assert e.error.name == "CompilationException" and e.error.value.startswith("<cell 4>:2: cannot find symbol"), e.error
    e = codes.run("byte[] all = new byte[Integer.MAX_VALUE - 8];", context=c)
    assert e.error.name == "EvalException" and "OutOfMemoryError" in e.error.value, e.error
    interrupted(codes, c, 'System.out.println("go"); while (true);')
    assert codes.run("sum", context=c).result[0].text == "30"
    e = codes.run("System.exit(3)", context=c)
    assert e.error.name == "ContextDied" and "exited with status 3" in e.error.value, e.error


def go(codes) -> None:
    chapter("go")
    c = codes.create_context(SupportedLanguage.GO)
    program = 'package main\nimport "fmt"\nfunc main() {\n    fmt.Println("hello %s")\n}'
    for who in "world", "world", "you":  # the second is there already
        before = time.monotonic()
        e = codes.run(program % who, context=c)
        print(f"{runtime}: go: hello {who} in {time.monotonic() - before:.3f} s", flush=True)
        assert e.error is None and e.id == c.id and out(e) == f"hello {who}\n", e
    e = codes.run('package main\n\nfunc main() {\n    nope()\n}', context=c)
    assert e.error.name == "CompileError" and e.error.value.startswith("main.go:4:5: undefined: nope"), e.error
    e = codes.run('import "os"\nfunc main() { os.Stderr.WriteString("bad"); os.Exit(3) }', context=c)
    assert e.error.name == "CommandExecError" and e.error.value == "3" and out(e, "stderr") == "bad", e
    interrupted(codes, c, 'import "fmt"\nfunc main() { fmt.Println("go"); for {} }')
    assert out(codes.run(program % "after", context=c)) == "hello after\n"


def memory(codes) -> None:
    chapter("memory of all")
    e = codes.run("const l = []; while (true) l.push(new Array(1e5).fill(1.5))", language=SupportedLanguage.JAVASCRIPT)
    assert e.error.name == "ContextDied" and "heap out of memory" in out(e, "stderr"), e
    assert codes.run("1 + 1", language=SupportedLanguage.JAVASCRIPT).result[0].text == "2"
    e = codes.run("var l [][]byte\nfunc main() { for { l = append(l, make([]byte, 1<<20)) } }", language=SupportedLanguage.GO)
    assert e.error.name == "CommandExecError" and "out of memory" in out(e, "stderr"), e
    assert out(codes.run("func main() { println(1) }", language=SupportedLanguage.GO), "stderr") == "1\n"


VERSIONED = {
    # language: the variable, a version, what it is called, what it is, code and what comes of it
    SupportedLanguage.PYTHON: ("PYTHON_VERSION", "3.99.1", "python3.99", "python3", "import os; print(os.environ['CHOSEN'])"),
    SupportedLanguage.JAVASCRIPT: ("NODE_VERSION", "99", "node99", "node", "console.log(process.env.CHOSEN)"),
    SupportedLanguage.JAVA: ("JAVA_VERSION", "99", "java-99", "java", 'System.out.println(System.getenv("CHOSEN"));'),
    SupportedLanguage.GO: ("GO_VERSION", "1.99", "go1.99", None, "func main() {}"),  # what compiles is not what runs
}


def versions() -> None:
    chapter("versions")
    with SandboxSync.create(image, env={v: version for v, version, *_ in VERSIONED.values()}, **OPTIONS) as s:
        codes = CodeInterpreterSync.create(s).codes
        for language, (_, _, name, program, code) in VERSIONED.items():
            e = codes.run("func main() { println(1) }" if language == SupportedLanguage.GO else "1 + 1", language=language)
            assert e.error is None, e  # a version that is not there is as none
            codes.delete_contexts(language)
            script = f"CHOSEN={name} exec {program} \"$@\"" if program else f"echo {name} >&2; exit 1"
            s.commands.run(f"printf '%s\\n' '#!/bin/sh' '{script}' > /usr/local/bin/{name} && chmod +x /usr/local/bin/{name}")
            e = codes.run(code, language=language)
            assert (out(e).strip() if program else e.error.value) == name, e
        s.kill()


def prestarted() -> None:
    chapter("prestart")
    languages = ["python", "bash"] + (["java"] if image == "code-interpreter" else [])
    options = dict(OPTIONS, extensions=dict(OPTIONS["extensions"], **{"sandboxd.prestart": ",".join(languages)}))
    with SandboxSync.create(image, **options) as s:
        codes = CodeInterpreterSync.create(s).codes
        deadline = time.monotonic() + 60
        for language in languages:
            while not (there := codes.list_contexts(language)):  # nobody is told of it
                assert time.monotonic() < deadline, language
                time.sleep(0.05)
            assert codes.run("true" if language != "python" else "True", language=language).id == there[0].id
        s.kill()
    options["extensions"]["sandboxd.prestart"] = "cobol"
    assert "cobol" in refused(SandboxSync.create, image, **options)


# What is set and got, and code that is interrupted at any time: some that does not end, some that ends by then.
INTERRUPTED = {
    SupportedLanguage.PYTHON: ("import time, asyncio, subprocess; x = 5", "print(x)", ["while True: pass", "time.sleep(100)", "subprocess.run(['sleep', '100'])", "await asyncio.sleep(100)", "time.sleep(0.01)", "1"]),
    SupportedLanguage.BASH: ("x=5", "echo $x", ["while :; do :; done", "sleep 100", "while :; do (:); done", "echo $(sleep 100)", "sleep 0.01", ":"]),
    SupportedLanguage.JAVASCRIPT: ("var x = 5, { execSync } = require('child_process')", "console.log(x)", ["while (true);", "await new Promise(() => setTimeout(() => {}, 1e6))", "execSync('sleep 100')", "await new Promise((f) => setTimeout(f, 10))", "1"]),
    SupportedLanguage.JAVA: ("int x = 5;", "System.out.println(x)", ["while (true);", "Thread.sleep(100000)", 'new ProcessBuilder("sleep", "100").start().waitFor()', "Thread.sleep(10)", "1"]),
    SupportedLanguage.GO: ("func main() {}", 'import "os"\nfunc main() { os.Stdout.WriteString("5\\n") }', ["func main() { for {} }", 'import "time"\nfunc main() { time.Sleep(time.Hour) }', "func main() {}"]),
}


def interrupts(codes, languages) -> None:
    """Each leaves its context usable, and ends no other call."""
    chapter("interrupts")
    rng = random.Random(1)
    for language in languages:
        before, after, programs = INTERRUPTED[language]
        c = codes.create_context(language)
        assert codes.run(before, context=c).error is None
        stopped = 0
        for i in range(int(os.environ.get("COMPAT_INTERRUPTS", "10"))):
            ends = []
            t = threading.Thread(target=lambda: ends.append(codes.run(programs[i % len(programs)], context=c)))
            t.start()
            t.join(rng.random() * 0.03)
            while t.is_alive():
                codes.interrupt(c.id)
                t.join(1)  # one that came before the call is none
            assert ends, (language, i)
            assert ends[0].error is None or ends[0].error.name in ("KeyboardInterrupt", "CommandExecError"), (language, i, ends[0].error)
            stopped += ends[0].error is not None
            e = codes.run(after, context=c)
            assert e.error is None and out(e) == "5\n" and e.id == c.id, (language, i, e)
        print(f"{runtime}: {language}: {stopped} of {i + 1} calls were stopped", flush=True)
        codes.delete_context(c.id)


def interrupted(codes, context, code) -> None:
    started, ends = threading.Event(), []
    h = ExecutionHandlersSync(on_stdout=lambda m: started.set())
    t = threading.Thread(target=lambda: ends.append(codes.run(code, context=context, handlers=h)))
    t.start()
    assert started.wait(30)
    codes.interrupt(context.id)
    t.join(20)
    assert ends and ends[0].error.name == "KeyboardInterrupt", ends


sandbox = SandboxSync.create(image, **OPTIONS)
try:
    chapter("ready")
    codes = CodeInterpreterSync.create(sandbox).codes
    plain(codes)
    if image == "code-interpreter":
        pictures(codes)
        nodes(codes)
        java(codes)
        go(codes)
        memory(codes)
        versions()
    interrupts(codes, INTERRUPTED if image == "code-interpreter" else [SupportedLanguage.PYTHON, SupportedLanguage.BASH])
    prestarted()
finally:
    sandbox.kill()


async def asynchronous() -> None:
    chapter("async")
    sandbox = await Sandbox.create(image, **OPTIONS)
    async with sandbox:
        try:
            codes = (await CodeInterpreter.create(sandbox=sandbox)).codes
            a, b = await asyncio.gather(codes.create_context(L.PYTHON), codes.create_context(L.PYTHON))
            await codes.run("import os; os.path.exists('/tmp/f') or os.mkfifo('/tmp/f')", context=a)
            # Both wait for one another: they overlap, or never end.
            r, w = await asyncio.wait_for(asyncio.gather(
                codes.run("open('/tmp/f').read()", context=a), codes.run("open('/tmp/f', 'w').write('met')", context=b)), 30)
            assert r.result[0].text == "'met'" and w.result[0].text == "3", (r, w)
            seen = []

            async def stdout(m):
                seen.append(m.text)

            await codes.run("print('async')", context=a, handlers=ExecutionHandlers(on_stdout=stdout))
            assert "".join(seen) == "async\n", seen
        finally:
            await sandbox.kill()


asyncio.run(asynchronous())
chapter("the end")
