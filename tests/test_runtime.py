"""The loop on a thread: what it owes to what runs on it."""

import asyncio
import time

from dstl.runtime import IoLoop


def test_a_connection_accepted_while_the_loop_closes_is_not_forgotten_before_it_begins() -> None:
    io, ended, tasks = IoLoop(), [], []

    async def current() -> asyncio.AbstractEventLoop:
        return asyncio.get_running_loop()

    async def connection() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            ended.append(True)

    def block() -> None:
        time.sleep(0.5)
        # Behind the callback of close(), which has come meanwhile, and before what that starts.
        loop.call_soon(lambda: tasks.append(loop.create_task(connection())))

    loop = io.run(current())
    loop.call_soon_threadsafe(block)
    time.sleep(0.1)
    io.close()
    assert ended == [True]
    assert tasks[0].cancelled()
