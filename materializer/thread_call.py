"""Work in a thread that nobody leaves behind."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import ParamSpec, TypeVar

__all__ = ["call_in_thread"]

P = ParamSpec("P")
T = TypeVar("T")


async def call_in_thread(work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run something in one of the loop's threads; a cancelled caller waits for it all the same.

    So what the thread writes to (a table) or reads from (a snapshot) may be closed as soon as this has ended.
    """
    running = asyncio.get_running_loop().run_in_executor(None, partial(work, *args, **kwargs))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        if not running.done():
            await asyncio.wait([running])
        if not running.cancelled():
            running.exception()  # looked at, so that asyncio does not report it as lost
        raise
