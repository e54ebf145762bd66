"""A TaskManager, or the coordinator of files, as a program: a :class:`LaunchSpec` on its input.

It says on its output where it listens, or why it does not. A TaskManager ends with its coordinator; unless it is
detached, any process ends when its input closes, for the parent has ended. SIGTERM, as a pod gets it that is to go,
ends it when it has handed over what it has.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from contextlib import suppress
from typing import TYPE_CHECKING

from dstl.errors import DstlError, Unavailable
from dstl.process.launch_spec import LaunchSpec, refusal_line
from dstl.process.lifecycle import ProcessLife, tune_process
from dstl.runtime import end_tasks
from dstl.store import open_store

if TYPE_CHECKING:
    from dstl.files.process import OpenStore

_log = logging.getLogger("dstl.process")
_DRIVER_ENDS_S = 5.0
"""From the end of its coordinator to that of its TaskManagers' lifelines."""


async def _main(open_store: OpenStore) -> int:
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    line = await reader.readline()
    if not line:
        return 0
    ended = asyncio.Event()
    loop.add_signal_handler(signal.SIGTERM, ended.set)
    # A terminal's Ctrl-C ends the driver, and that ends this process when everything is stored.
    loop.add_signal_handler(signal.SIGINT, lambda: None)

    async def watch_parent(is_detached: bool) -> None:
        while await reader.read(1024):
            pass
        if not is_detached:
            ended.set()

    watcher = None
    try:
        spec = LaunchSpec.from_line(line)
        watcher = asyncio.ensure_future(watch_parent(spec.detached))
        await ProcessLife(spec, open_store=open_store, say=_say).run(ended)
    except DstlError as error:
        if isinstance(error, Unavailable) and await _is_set_soon(ended):
            _log.info("its driver has ended, and so does the process: %s", error)
            return 0
        _log.error("the process ends: %s", error)
        _say(refusal_line(error))
        return 1
    except MemoryError:
        _log.error("the process ends: it has run out of memory")
        return 1
    finally:
        if watcher is not None:
            await end_tasks([watcher])
    return 0


async def _is_set_soon(ended: asyncio.Event) -> bool:
    """Return whether the process is to end: a driver closes its coordinator, and then lets its TaskManagers go."""
    with suppress(TimeoutError):
        async with asyncio.timeout(_DRIVER_ENDS_S):
            await ended.wait()
    return ended.is_set()


def _say(line: bytes) -> None:
    sys.stdout.buffer.write(line)
    sys.stdout.buffer.flush()


def main(open_store: OpenStore = open_store) -> int:
    """Be a process; returns its exit code.

    Args:
        open_store: Opens a location; for benchmarks, which slow it down.
    """
    logging.basicConfig(
        level=os.environ.get("DSTL_LOG_LEVEL", "WARNING"),
        format="%(asctime)s %(levelname)s dstl[%(process)d] %(message)s",
    )
    if "DSTL_LOG_LEVEL" not in os.environ:
        # A restore that takes long says so.
        logging.getLogger("materializer.restore.progress").setLevel(logging.INFO)
    tune_process()
    return asyncio.run(_main(open_store))
