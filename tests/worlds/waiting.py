"""Waiting for what comes true by and by: not for ever, and what was waited for in vain is named."""

import asyncio
import inspect
import time
from collections.abc import Callable
from typing import Any

PATIENCE_S = 60.0  # a busy machine takes long for what is done in a second


async def until(condition: Callable[[], Any], what: str, seconds: float = PATIENCE_S) -> Any:
    """Return what a condition, or a coroutine function, returns once it is true; by the loop's clock.

    Raises:
        AssertionError: It has not come true in so many seconds.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + seconds
    while True:
        found = condition()
        if inspect.isawaitable(found):
            found = await found
        if found:
            return found
        assert loop.time() < deadline, f"waited {seconds:g} s in vain for {what}"
        await asyncio.sleep(0.01)


def wait_until(condition: Callable[[], Any], what: str, seconds: float = PATIENCE_S) -> Any:
    """Return what a condition returns once it is true.

    Raises:
        AssertionError: It has not come true in so many seconds.
    """
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, f"waited {seconds:g} s in vain for {what}"
        time.sleep(0.02)
    return found
