"""Runs a block of an SDK's README that begins in the middle: with what the
README had before it, and with `await` outside of functions, as in a notebook.

Usage: quickstart.py FILE
"""

import ast
import asyncio
import inspect
import sys

from code_interpreter import CodeInterpreter
from opensandbox.config import ConnectionConfig
from opensandbox.sandbox import Sandbox


async def main(path: str) -> None:
    with open(path, encoding="utf-8") as f:
        text = f.read()
    code = "interpreter" in text
    config = ConnectionConfig(domain="api.opensandbox.io", api_key="your-api-key")
    sandbox = await Sandbox.create("opensandbox/code-interpreter:v1.1.0" if code else "ubuntu", connection_config=config)
    names = {"asyncio": asyncio, "ConnectionConfig": ConnectionConfig, "Sandbox": Sandbox}
    names |= {"config": config, "sandbox": sandbox, "sandbox_id": sandbox.id}
    if code:
        names["interpreter"] = await CodeInterpreter.create(sandbox=sandbox)
    block = compile(text, path, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    if inspect.iscoroutine(left := eval(block, names)):
        await left
    print("ran", path)


asyncio.run(main(sys.argv[1]))
