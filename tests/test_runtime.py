"""The loop on a thread: what it owes to what runs on it."""

import asyncio
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dstl.runtime import IoLoop, closed_after


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


_PROGRAM = """
import sys, weakref
from dstl.runtime import IoLoop, call_before_exit
from dstl.store import open_store

class Backend: pass

loop, store, backend = IoLoop(), open_store(sys.argv[1]), Backend()
loop.run(store.put("before", b"x"))  # its threads are there

def end():
    loop.run(store.put("last", b"x"))
    loop.close()
    raise ValueError("and fails then")

closer = weakref.finalize(backend, end)
call_before_exit(closer)
if sys.argv[2] == "closed":
    try: closer()
    except ValueError: pass
"""


@pytest.mark.parametrize("how", ["forgotten", "closed"])
def test_what_a_program_forgets_to_close_can_store_its_last_objects(tmp_path: Path, how: str) -> None:
    """Prevents that the bases of a program's only run are never named by a checkpoint, and its log only grows."""
    ended = subprocess.run(
        [sys.executable, "-c", _PROGRAM, str(tmp_path / "store"), how], capture_output=True, text=True, timeout=60
    )
    assert ended.returncode == 0
    assert (tmp_path / "store" / "last").exists(), ended.stderr
    assert "cannot schedule" not in ended.stderr
    assert ended.stderr.count("ValueError: and fails then") == (how == "forgotten"), "the closer is called once"


async def test_what_is_opened_is_closed_after_a_block_even_where_closing_another_fails() -> None:
    closed = []

    class Opened:
        def __init__(self, name: str) -> None:
            self.name = name

        async def close(self) -> None:
            closed.append(self.name)
            if self.name == "reader":
                raise OSError(self.name)

    with pytest.raises(OSError, match="reader"):
        async with closed_after(Opened("store"), Opened("reader")):
            raise ValueError
    assert closed == ["reader", "store"]
