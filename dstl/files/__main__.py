"""A file process: ``python -m dstl.files``, started by Spark's plugin, an invitation on its input.

It says on its output where it listens. A coordinator ends when its input closes (the driver has ended), a host's
service when its coordinator does. SIGTERM, as a pod gets it that is to go, ends a host's service when what it has is
stored and told to the coordinator.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from typing import Any

from dstl.errors import DstlError
from dstl.files.invitation import FileInvitation, answer_line
from dstl.files.process import OpenStore, configuration, coordinating, described, hosting
from dstl.runtime import system_runtime
from dstl.store import open_store

__all__ = ["main"]

_log = logging.getLogger("dstl.files")

_HAND_OVER_S = 25.0
"""Kubernetes kills half a minute after it has asked."""


def _say(line: bytes) -> None:
    sys.stdout.buffer.write(line)
    sys.stdout.buffer.flush()


async def _input_closed(reader: asyncio.StreamReader) -> None:
    while await reader.read(1024):
        pass


async def _run(open_store: OpenStore) -> int:
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    reader = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    line = await reader.readline()
    if not line:
        return 0
    loop.add_signal_handler(signal.SIGTERM, ended.set)
    # A terminal's Ctrl-C ends the driver, and that ends this process when everything is stored.
    loop.add_signal_handler(signal.SIGINT, lambda: None)
    stopped = asyncio.ensure_future(ended.wait())
    try:
        invitation = FileInvitation.from_line(line)
        config, runtime = configuration(invitation.options, os.environ), system_runtime()
        if invitation.kind == "coordinator":
            async with coordinating(invitation, config, runtime, open_store) as socket:
                _say(answer_line(socket))
                await _first_of(asyncio.ensure_future(_input_closed(reader)), stopped)
        else:
            async with hosting(invitation, config, runtime, open_store) as host:
                _say(answer_line(host.socket))
                await _first_of(host.orphaned, stopped)
                if stopped.done():
                    await asyncio.wait([asyncio.ensure_future(host.hand_over())], timeout=_HAND_OVER_S)
    except DstlError as error:
        _log.error("the file process ends: %s", error)
        _say(answer_line("", described(error)))
        return 1
    finally:
        stopped.cancel()
    return 0


async def _first_of(*futures: asyncio.Future[Any]) -> None:
    await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)
    futures[0].cancel()
    await asyncio.gather(*futures[:1], return_exceptions=True)


def main(open_store: OpenStore = open_store) -> int:
    """Be a file process.

    Args:
        open_store: Opens a location; for benchmarks and tests, which slow it down or make it fail.
    """
    logging.basicConfig(
        level=os.environ.get("DSTL_LOG_LEVEL", "WARNING"),
        format="%(asctime)s %(levelname)s files[%(process)d] %(message)s",
    )
    return asyncio.run(_run(open_store))


if __name__ == "__main__":
    sys.exit(main())
