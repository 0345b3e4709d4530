"""What a program of a client library did: which of the library's methods it
called, and which of its chapters the daemon refused.

The library stays as it is. A program holds Watched objects, which pass on what
it asks of them and remember that it came back.

Environment: COMPAT_REPORT is the file that the report goes to when the program
ends well, as JSON; COMPAT_UNSERVED names, separated by commas, the chapters
that the daemon is known to refuse (test/compat/unserved.json). Any other
chapter that fails ends the program.
"""

import contextlib
import inspect
import json
import os


class Report:
    def __init__(self, program: str) -> None:
        self.program = program
        self.rows: set[str] = set()  # what the library has, and options that chapters show
        self.done: set[str] = set()  # what was called and came back
        self.refused: dict[str, dict] = {}
        self.served: set[str] = set()
        self._unserved = set(filter(None, os.environ.get("COMPAT_UNSERVED", "").split(",")))

    def surface(self, name: str, interface: type) -> None:
        """Adds the public methods of a class, or of the protocol that it keeps."""
        for attr in dir(interface):
            if not attr.startswith("_") and callable(getattr(interface, attr)):
                self.rows.add(f"{name}.{attr}")

    def called(self, name: str) -> None:
        self.done.add(name)

    @contextlib.contextmanager
    def chapter(self, name: str, *rows: str):
        """Runs its body. The rows are methods that the body calls, or options
        of one that it shows, as "Sandbox.create(volumes=)"."""
        print(f"{self.program}: {name}", flush=True)
        methods = [r for r in rows if r in self.rows]
        self.rows.update(rows)
        try:
            yield
        except Exception as e:  # noqa: BLE001  (whatever the library makes of a refusal)
            if name not in self._unserved:
                raise
            self.refused[name] = {"said": f"{type(e).__name__}: {e}", "rows": sorted(rows)}
            return
        left_out = [m for m in methods if m not in self.done]
        assert not left_out, f"the chapter {name} says it calls {left_out}, and did not"
        self.done.update(rows)
        self.served.add(name)

    def write(self) -> None:
        with open(os.environ["COMPAT_REPORT"], "w", encoding="utf-8") as f:
            json.dump(
                {
                    "rows": sorted(self.rows),
                    "done": sorted(self.done & self.rows),
                    "refused": self.refused,
                    "served": sorted(self.served),
                },
                f,
            )
        print(f"{self.program}: the end", flush=True)


async def settle(result):
    """What a call came to, whether it has to be awaited or not."""
    return await result if inspect.isawaitable(result) else result


class Watched:
    """An object of the library under the name that its users know it by. Its
    methods can be awaited whether the library's can or not, so that one
    program serves both of its flavours."""

    def __init__(self, report: Report, it: object, name: str, services: set[str], results: dict[str, str]) -> None:
        self._report, self._it, self._name = report, it, name
        self._services, self._results = services, results

    def _watch(self, it: object, name: str) -> "Watched":
        return Watched(self._report, it, name, self._services, self._results)

    def __getattr__(self, attr: str):
        value, name = getattr(self._it, attr), f"{self._name}.{attr}"
        if name in self._services:
            return self._watch(value, name)
        if not callable(value):
            return value

        async def call(*args, **kwargs):
            result = await settle(value(*args, **kwargs))
            self._report.called(name)
            known = self._results.get(name)
            return self._watch(result, known) if known else result

        return call
