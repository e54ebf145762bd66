"""The TaskManager process: ``python -m dstl.taskmanager``, an :class:`Invitation` on the first line of standard input.

It ends with its application: when its coordinator's connection ends, or, unless it is detached, when standard input
closes (the parent has ended), whichever comes first.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
from importlib.abc import MetaPathFinder

from dstl.errors import DstlError
from dstl.taskmanager.launcher import Invitation
from dstl.taskmanager.process import run

_log = logging.getLogger("dstl.taskmanager")


class _WithoutPandas(MetaPathFinder):
    """Finds no pandas in this process, which has no use for it.

    Arrow imports it, where it is installed, before it makes its first array.
    """

    def find_spec(self, fullname: str, path: object, target: object = None) -> None:
        if fullname == "pandas":
            raise ModuleNotFoundError("a TaskManager does without pandas", name=fullname)


async def _main() -> int:
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    reader = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    line = await reader.readline()
    if not line:
        return 0
    try:
        invitation = Invitation.from_json(line.decode())
    except (ValueError, TypeError, KeyError) as error:
        # Not what it says: the line may hold the secret.
        _log.error("the first line of standard input is no invitation of a TaskManager (%s)", type(error).__name__)
        return 2
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, ended.set)

    async def watch_parent() -> None:
        while await reader.read(1024):
            pass
        if not invitation.detached:
            ended.set()

    watcher = asyncio.ensure_future(watch_parent())
    try:
        await run(invitation, ended)
    except DstlError as error:
        _log.error("TaskManager %s ends: %s", invitation.member_id, error)
        return 1
    except MemoryError:
        _log.error("TaskManager %s ends: it has run out of memory", invitation.member_id)
        return 1
    finally:
        watcher.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watcher
    return 0


if __name__ == "__main__":
    sys.meta_path.insert(0, _WithoutPandas())
    logging.basicConfig(
        level=os.environ.get("DSTL_LOG_LEVEL", "WARNING"),
        format="%(asctime)s %(levelname)s taskmanager[%(process)d] %(message)s",
    )
    if "DSTL_LOG_LEVEL" not in os.environ:
        # A restore that takes long says so.
        logging.getLogger("materializer.restore.progress").setLevel(logging.INFO)
    sys.exit(asyncio.run(_main()))
