"""The TaskManager process: ``python -m dstl.taskmanager``, configuration on the first line of standard input.

It ends with its application: when standard input closes (the parent has ended) or when the coordinator's connection
does, whichever comes first.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import shutil
import signal
import sys
import tempfile
from pathlib import Path

from dstl.changelog.names import SegmentNames
from dstl.changelog.storage import StateChangelogStorage
from dstl.changelog.uploader import Uploader
from dstl.errors import DstlError
from dstl.metrics import MemoryRecorder
from dstl.runtime import system_runtime
from dstl.store import open_store, shard_names
from dstl.store.instrumented import InstrumentedStore
from dstl.taskmanager.client import Address, AsyncConnection
from dstl.taskmanager.launcher import TaskManagerConfig
from dstl.taskmanager.materializing import materialize
from dstl.taskmanager.service import TaskManagerService
from dstl.taskmanager.state_backend import TaskManagerStateBackend
from materializer.tables import open_table

_log = logging.getLogger("dstl.taskmanager")


async def run(config: TaskManagerConfig, parent_ended: asyncio.Event) -> None:
    """Serve until the application ends."""
    runtime, recorder = system_runtime(), MemoryRecorder()
    store = InstrumentedStore(open_store(config.location, config.s3), recorder=recorder)
    hedge_store = InstrumentedStore(open_store(config.location, config.s3), recorder=recorder)
    uploader = Uploader(
        store,
        runtime=runtime,
        options=config.upload,
        hedging=config.hedging,
        recorder=recorder,
        hedge_store=hedge_store,
    )
    directory = Path(tempfile.mkdtemp(prefix="dstl-"))
    tables = itertools.count()

    def open_backend(query_id: str) -> TaskManagerStateBackend:
        names = SegmentNames(query_id, runtime.new_id(), runtime, shard_names(store))
        storage = StateChangelogStorage(
            uploader=uploader,
            store=store,
            names=names,
            options=config.batching,
            runtime=runtime,
            recorder=recorder,
        )
        backend = TaskManagerStateBackend(
            storage,
            # Each table lies in a directory of its own: a restored one is opened while its predecessor is still there.
            lambda operator: open_table(config.table, directory / "tables" / f"{operator}-{next(tables)}"),
            runtime,
            max_parallelism=config.max_parallelism,
        )
        materialize(
            backend,
            uploader=uploader,
            names=names,
            store=store,
            options=config.materialization,
            runtime=runtime,
            recorder=recorder,
        )
        return backend

    service = TaskManagerService(
        open_backend,
        store,
        runtime,
        config.secret,
    )
    try:
        socket_path = str(directory / "socket")
        await service.server.listen_unix(socket_path)
        port = await service.server.listen_tcp(config.host) if config.listen_tcp else 0
        member = asyncio.ensure_future(_be_member(config, Address(config.host, port, socket_path)))
        stopped = asyncio.ensure_future(parent_ended.wait())
        await asyncio.wait({member, stopped}, return_when=asyncio.FIRST_COMPLETED)
        for task in (stopped, member):
            task.cancel()
        await asyncio.gather(stopped, return_exceptions=True)
        with contextlib.suppress(asyncio.CancelledError):
            await member
    finally:
        await service.close()
        await uploader.close()
        await store.close()
        await hedge_store.close()
        shutil.rmtree(directory, ignore_errors=True)


async def _be_member(config: TaskManagerConfig, own: Address) -> None:
    """Register with the coordinator, and return when it has ended."""
    lifeline = await AsyncConnection.open(config.coordinator, config.secret)
    try:
        await lifeline.call("register", member=config.member_id, address=own.to_wire(), pid=os.getpid())
        await lifeline.wait_closed_by_peer()
    finally:
        lifeline.close()


_SWITCH_S = 0.001
"""How long a thread that encodes or decodes may hold the interpreter while the loop wants to answer a task. Python's
own 5 ms, several times per batch, would be the largest part of what a materialization costs a batch."""


async def _main() -> int:
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    reader = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    line = await reader.readline()
    if not line:
        return 0
    try:
        config = TaskManagerConfig.from_json(line.decode())
    except (ValueError, TypeError, KeyError) as error:
        # Not what it says: the line may hold the secret.
        _log.error("the first line of standard input is not a TaskManager's configuration (%s)", type(error).__name__)
        return 2
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, ended.set)

    async def watch_parent() -> None:
        while await reader.read(1024):
            pass
        ended.set()

    sys.setswitchinterval(_SWITCH_S)
    watcher = asyncio.ensure_future(watch_parent())
    try:
        await run(config, ended)
    except DstlError as error:
        _log.error("TaskManager %s ends: %s", config.member_id, error)
        return 1
    finally:
        watcher.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watcher
    return 0


if __name__ == "__main__":
    logging.basicConfig(
        level=os.environ.get("DSTL_LOG_LEVEL", "WARNING"),
        format="%(asctime)s %(levelname)s taskmanager[%(process)d] %(message)s",
    )
    sys.exit(asyncio.run(_main()))
