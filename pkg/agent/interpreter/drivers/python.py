# The python driver of a context: it reads cells from the agent, one JSON object
# a line, runs them in __main__, and answers with frames.
#
# A frame is a line of the context's secret and a JSON object, with an empty
# line before it. So what else somebody writes to that descriptor is skipped by
# the agent. Code in this process can find descriptor and secret all the same:
# what it then says, it says of its own context only.

import base64
import builtins
import json
import os
import signal
import sys
import types
import _thread

MIB = 1 << 20
MAX_TEXT = MIB  # characters of a text/plain
MAX_BUNDLE = 3 * MIB  # bytes of all formats of one result: some SDKs take lines of 4 MiB
MAX_JSON_CELLS = 10_000  # of a data frame that is also given as JSON
REMEMBERED = 1000  # cells whose source tracebacks can show

PID = os.getpid()
MAIN = _thread.get_ident()
results = 0  # sent so far
running = False  # user code is: only then does SIGINT raise


def keep(fd, high):
    """Puts a descriptor where programs that count from 3 do not meet it. No child inherits it."""
    try:
        return os.dup2(fd, high, inheritable=False)
    except OSError:  # a low limit of open files
        return os.dup(fd)


channel = keep(3, 200)
saved = {1: keep(1, 201), 2: keep(2, 202)}
os.close(3)
requests = open(channel, "rb", closefd=False)
lock = _thread.allocate_lock()


def say(kind, **fields):
    """Sends a frame, after all that was printed before it. A fork of the driver sends none."""
    if os.getpid() != PID:
        return
    for stream in sys.stdout, sys.stderr:
        try:
            stream.flush()
        except Exception:
            pass  # closed, or not a stream at all
    text = json.dumps(dict(fields, type=kind), ensure_ascii=False)
    rest = memoryview(b"\n" + secret + text.encode("utf-8", "replace") + b"\n")  # noqa: F821
    with lock:
        while rest:
            rest = rest[os.write(channel, rest):]


def say_result(bundle):
    """Sends a result. Code waits until it was delivered: what it prints next comes next."""
    global results
    if not running or _thread.get_ident() != MAIN or os.getpid() != PID:
        say("result", results=bundle)
        return
    results += 1
    say("result", results=bundle, ack=results)
    want = b"%d\n" % results
    while requests.readline() not in (want, b""):
        pass  # of one whose wait was interrupted


def open_streams():
    """Mends standard output and error where code has closed them. What it redirected stays so."""
    for fd, name in (1, "stdout"), (2, "stderr"):
        try:
            os.fstat(fd)
        except OSError:
            try:
                os.dup2(saved[fd], fd)
            except OSError:
                pass  # closed, too: the context is silent from now on
        stream = getattr(sys, name, None)
        if stream is None or getattr(stream, "closed", False):
            stream = open(fd, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)
            setattr(sys, name, stream)


def on_interrupt(*_):
    if running:
        raise KeyboardInterrupt


# Results.

FORMATS = (
    ("text/html", "_repr_html_"),
    ("text/markdown", "_repr_markdown_"),
    ("text/latex", "_repr_latex_"),
    ("image/svg+xml", "_repr_svg_"),
    ("image/png", "_repr_png_"),
    ("image/jpeg", "_repr_jpeg_"),
    ("application/pdf", "_repr_pdf_"),
    ("application/json", "_repr_json_"),
    ("application/javascript", "_repr_javascript_"),
)


def as_text(mime, data):
    """Every value of a bundle is a string: base64 of bytes, JSON of what is no string."""
    if isinstance(data, (bytes, bytearray, memoryview)):
        return base64.b64encode(bytes(data)).decode("ascii")
    if isinstance(data, str) and not mime.endswith("json"):
        return data
    return data if isinstance(data, str) else json.dumps(data, default=str)


def figure_formats(figure):
    """png and svg of a matplotlib figure."""
    import io

    for mime, kind in ("image/png", "png"), ("image/svg+xml", "svg"):
        out = io.BytesIO()
        figure.savefig(out, format=kind, bbox_inches="tight")
        data = out.getvalue()
        yield mime, data if kind == "png" else data.decode("utf-8")


def is_of(obj, module, name):
    kind = getattr(sys.modules.get(module), name, None)
    return isinstance(kind, type) and isinstance(obj, kind)


def formats(obj):
    """Yields (mime, data) of all that obj says of itself beside its repr."""
    if is_of(obj, "matplotlib.figure", "Figure"):
        yield from figure_formats(obj)
        return
    if type(obj) in (dict, list):
        try:
            text = json.dumps(obj, allow_nan=False)
        except (TypeError, ValueError, RecursionError):
            return
        yield "application/json", text
        return
    if isinstance(obj, type):
        return  # its methods are those of its objects
    bundle = getattr(obj, "_repr_mimebundle_", None)
    if callable(bundle):
        found = bundle(include=None, exclude=None)
        yield from dict(found[0] if isinstance(found, tuple) else found or {}).items()
    for mime, name in FORMATS:
        method = getattr(obj, name, None)
        if callable(method):
            data = method()
            yield mime, data[0] if isinstance(data, tuple) else data
    if is_of(obj, "pandas", "DataFrame") and obj.size <= MAX_JSON_CELLS:
        yield "application/json", obj.to_json(orient="split", date_format="iso")


def describe(obj):
    """Returns the bundle of a value. Only its repr may raise."""
    text = repr(obj)
    if len(text) > MAX_TEXT:
        text = f"{text[:MAX_TEXT]}… ({len(text)} characters in all)"
    bundle = {"text": text}
    try:
        for mime, data in formats(obj):
            if data is not None and mime != "text/plain":
                bundle[mime] = as_text(mime, data)
            elif isinstance(data, str):
                bundle["text"] = data[:MAX_TEXT]
    except Exception as e:
        print(f"a format of {type(obj).__name__} failed: {type(e).__name__}: {e}", file=sys.stderr)
    return fitting(bundle)


def fitting(bundle):
    """Leaves out the largest formats until the rest fits into one event."""
    size = {mime: len(data.encode("utf-8", "replace")) for mime, data in bundle.items()}
    while sum(size.values()) > MAX_BUNDLE and len(size) > 1:
        mime = max(size.keys() - {"text"}, key=size.get)
        print(f"{mime} is left out: it has {size.pop(mime)} bytes; a result may have at most {MAX_BUNDLE}", file=sys.stderr)
        del bundle[mime]
    return bundle


def display(*objects, raw=False, **_):
    """Sends objects as results, as IPython's display does. With raw=True they are dicts of formats."""
    for obj in objects:
        if raw:
            bundle = {str(mime): as_text(mime, data) for mime, data in obj.items()}
            bundle.setdefault("text", bundle.pop("text/plain", ""))
            say_result(fitting(bundle))
        else:
            say_result(describe(obj))


class AfterPyplot:
    """Finds matplotlib.pyplot like anybody else, and gives it a show() that displays."""

    def find_spec(self, name, path=None, target=None):
        if name != "matplotlib.pyplot":
            return None
        import importlib.util

        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        run = spec.loader.exec_module

        def exec_module(module):
            run(module)
            module.switch_backend("agg")
            module.show = show_figures

        spec.loader.exec_module = exec_module
        return spec


def show_figures(*_, **__):
    """Displays every open figure, and closes it."""
    managers = getattr(sys.modules.get("matplotlib._pylab_helpers"), "Gcf", None)
    if managers is None:
        return
    figures = [m.canvas.figure for m in managers.get_all_fig_managers()]
    managers.destroy_all()
    for figure in figures:
        display(figure)


# Running cells.

main = types.ModuleType("__main__")
main.__builtins__ = builtins
FUTURES = 0
for _name in __import__("__future__").all_feature_names:
    FUTURES |= getattr(__import__("__future__"), _name).compiler_flag
flags = 0  # from __future__ imports of earlier cells
cells = []  # names in linecache, oldest first
loop = None


def shell_lines(code):
    """Replaces lines as !ls and %pip install x, which are IPython's, by calls."""
    lines = []
    for line in code.split("\n"):
        body = line.lstrip()
        indent = line[: len(line) - len(body)]
        if body.startswith("!"):
            line = f"{indent}__import__('subprocess').run({body[1:]!r}, shell=True)"
        elif body.startswith("%pip "):
            line = f"{indent}__import__('subprocess').run({sys.executable + ' -m ' + body[1:]!r}, shell=True)"
        elif body.startswith("%matplotlib"):
            line = f"{indent}pass"
        lines.append(line)
    return "\n".join(lines)


def build(code, name):
    """Returns the code objects of a cell: its statements, and its last expression or None."""
    global flags
    import ast
    import linecache

    linecache.cache[name] = (len(code), None, code.splitlines(True), name)
    cells.append(name)
    if len(cells) > REMEMBERED:
        linecache.cache.pop(cells.pop(0), None)
    options = flags | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT

    def syntax(text):
        return compile(text, name, "exec", options | ast.PyCF_ONLY_AST, dont_inherit=True)

    try:
        tree = syntax(code)
    except SyntaxError:
        changed = shell_lines(code)
        if changed == code:
            raise
        tree = syntax(changed)
    last = None
    if tree.body and isinstance(tree.body[-1], ast.Expr):
        value = tree.body.pop().value
        if code.rstrip().endswith(";"):  # as in IPython: the value is not wanted
            tree.body.append(ast.copy_location(ast.Expr(value), value))
        else:
            last = ast.Expression(value)
    body = compile(tree, name, "exec", options, dont_inherit=True)
    flags |= body.co_flags & FUTURES
    if last is not None:
        last = compile(last, name, "eval", options | flags, dont_inherit=True)
    return body, last


CO_COROUTINE = 0x80


def evaluate(code):
    """Runs a code object in __main__; one that awaits, in the context's event loop."""
    global loop
    if not code.co_flags & CO_COROUTINE:
        return eval(code, main.__dict__)
    import asyncio

    # An interrupt waits until there is a task to be cancelled: a loop that is half
    # made complains.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        if loop is None or loop.is_closed():
            loop = asyncio.new_event_loop()
        asyncio.set_event_loop(loop)
        task = loop.create_task(eval(code, main.__dict__))
        try:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            return loop.run_until_complete(task)
        except KeyboardInterrupt:
            task.cancel()
            try:
                loop.run_until_complete(task)
            except asyncio.CancelledError:
                pass
            raise
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def failure(error):
    """Returns the fields of an error frame; the frames of this driver are cut off."""
    import traceback

    kind = type(error).__name__
    try:
        value = str(error)
    except Exception as e:
        value = f"(its str() failed: {type(e).__name__})"
    place = error.__traceback__
    while place is not None and not place.tb_frame.f_code.co_filename.startswith("<cell "):
        place = place.tb_next
    try:
        lines = [line.rstrip("\n") for line in traceback.format_exception(type(error), error, place)]
    except Exception:
        lines = [f"{kind}: {value}"]
    return {"ename": kind, "evalue": value[:MAX_TEXT], "traceback": [line[:MAX_TEXT] for line in lines[:1000]]}


def run(code, name):
    global running
    signal.signal(signal.SIGINT, on_interrupt)
    open_streams()
    try:
        try:
            running = True
            body, last = build(code, name)
            evaluate(body)
            if last is not None:
                value = evaluate(last)
                if value is not None:
                    builtins._ = value
                    if is_of(value, "matplotlib.figure", "Figure"):
                        close_figure(value)  # it is shown once
                    say_result(describe(value))
            show_figures()
        finally:
            running = False
    except BaseException as error:  # SystemExit, too: the context lives on
        running = False  # an interrupt may have come before it was
        fields = failure(error)
        error.__traceback__ = None  # frees what its frames hold
        return fields
    return None


def close_figure(figure):
    managers = getattr(sys.modules.get("matplotlib._pylab_helpers"), "Gcf", None)
    if managers is not None:
        managers.destroy_fig(figure)


def limit_memory(size):
    """Has who asks for more than the sandbox has get MemoryError, and not the kernel's SIGKILL.

    size is what the sandbox has, in bytes. gVisor does not mind RLIMIT_DATA. There an out-of-memory kill ends the
    whole sandbox, so the address space is limited: by what is mapped already, and that size.
    """
    import mmap
    import resource

    def limit(what, soft):
        try:
            resource.setrlimit(what, (soft, resource.getrlimit(what)[1]))
        except (OSError, ValueError):
            pass  # a lower hard limit stands already

    limit(resource.RLIMIT_DATA, size - size // 8)
    try:
        mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS).close()  # touches nothing
    except (OSError, MemoryError):
        return
    with open("/proc/self/statm") as f:
        limit(resource.RLIMIT_AS, int(f.read().split()[0]) * mmap.PAGESIZE + size)


def move(place):
    """Gives this process, which has run nothing, the environment and the memory of another sandbox."""
    try:
        for name, (before, after) in place["env"].items():
            if os.environ.get(name) != before:
                raise ValueError(name)
            if after is None:
                del os.environ[name]
            else:
                os.environ[name] = after
        import resource

        for what in resource.RLIMIT_DATA, resource.RLIMIT_AS:  # the one of before
            resource.setrlimit(what, (resource.getrlimit(what)[1],) * 2)
        if place["memory"] > 0:
            limit_memory(place["memory"])
    except BaseException:
        os._exit(1)  # the next call gets a new context


def reseed(seed):
    """Has code draw other random numbers: this process is a copy of one that goes on."""
    seed = bytes.fromhex(seed) + os.urandom(32)

    def node_of_uuid1(uuid):
        # libuuid keeps a clock sequence in memory, and without it uuid1 draws one each time.
        for name in "_generate_time_safe", "_uuid_generate_time":
            if getattr(uuid, name, None) is not None:
                setattr(uuid, name, None)
        uuid._node = int.from_bytes(os.urandom(6), "big") | 1 << 40  # RFC 4122, 4.5: a multicast address is no card's
        uuid._last_timestamp = None

    for name, change in (
        ("random", lambda m: m.seed(seed)),
        ("numpy.random", lambda m: m.seed()),
        ("_ssl", lambda m: m.RAND_add(seed, 32.0)),  # OpenSSL reads the kernel's as well, then
        ("uuid", node_of_uuid1),
    ):
        try:
            if name in sys.modules:
                change(sys.modules[name])
        except Exception:
            pass  # code has put something else there


def serve():
    if memory > 0:  # noqa: F821
        limit_memory(memory)  # noqa: F821
    sys.modules["__main__"] = main
    sys.argv = [""]
    sys.meta_path.insert(0, AfterPyplot())
    builtins.display = display
    for name in "stdout", "stderr":
        getattr(sys, name).reconfigure(encoding="utf-8", errors="backslashreplace", line_buffering=True)
    import ast, linecache, traceback  # noqa: F401, E401: what the first cell needs, while nobody waits

    while True:
        try:
            line = requests.readline()
        except KeyboardInterrupt:
            continue
        if not line:
            return
        if not line.startswith(b"{"):
            continue  # an answer that came after an interrupt
        request = json.loads(line)
        if "settle" in request:
            say("settled", status=request["settle"])
            continue
        if "reseed" in request:
            reseed(request["reseed"])
            continue
        if "move" in request:
            move(request["move"])
            continue
        fields = run(request["code"], f"<cell {request['count']}>")
        if os.getpid() != PID:  # a fork of the cell that came back from it
            try:
                sys.stdout.flush()
            finally:
                os._exit(0 if fields is None else 1)
        try:
            say("done", **({"error": fields} if fields else {}))
        except MemoryError:
            say("done", error={"ename": "MemoryError", "evalue": "", "traceback": ["MemoryError"]})
