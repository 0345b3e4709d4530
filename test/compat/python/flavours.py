"""What the two flavours of the SDKs want differently of one program."""

import inspect

from opensandbox.models.execd import ExecutionHandlers
from opensandbox.models.execd_sync import ExecutionHandlersSync


def handlers(sync: bool, **on):
    """Both flavours want their own, the asynchronous one with coroutines."""
    if sync:
        return ExecutionHandlersSync(**on)

    def awaitable(f):
        async def g(event):
            result = f(event)
            if inspect.isawaitable(result):
                await result

        return g

    return ExecutionHandlers(**{k: awaitable(f) for k, f in on.items()})
