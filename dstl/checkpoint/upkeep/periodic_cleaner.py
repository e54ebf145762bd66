"""Cleans a location while its query runs: after each recovery, then periodically, blocking no checkpoint."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from dstl.checkpoint.manifest.reader import ManifestReader
from dstl.checkpoint.upkeep.cleaner import Held, LiveWriterIds, clean
from dstl.errors import DstlError, Fenced
from dstl.options import CheckpointOptions
from dstl.runtime import Runtime
from dstl.store.base import ObjectStore

__all__ = ["PeriodicCleaner"]

_log = logging.getLogger(__name__)


class PeriodicCleaner:
    """Runs the cleaner in the background. One event loop.

    Args:
        store: The location; all that is read or written here goes through it, and is no checkpoint's request.
        runtime: Clock and ids.
        epoch: The driver's: one that has been fenced deletes nothing.
        live_writer_ids: Asked by every pass; see :func:`~dstl.checkpoint.upkeep.cleaner.clean`.
        held: The same.
        options: Interval and grace.
    """

    def __init__(
        self,
        store: ObjectStore,
        runtime: Runtime,
        epoch: Callable[[], int],
        live_writer_ids: LiveWriterIds,
        held: Held,
        options: CheckpointOptions,
    ) -> None:
        self._store = store
        self._runtime = runtime
        self._epoch = epoch
        self._live_writer_ids = live_writer_ids
        self._held = held
        self._options = options
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin with a pass now; called again, nothing happens while the task runs. It ends where it is fenced."""
        if self._options.clean_interval_s > 0 and (self._task is None or self._task.done()):
            self._task = asyncio.get_running_loop().create_task(self._run())

    async def close(self) -> None:
        """Stop; a pass may be cut off anywhere. Idempotent."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.wait([task])

    async def _run(self) -> None:
        while True:
            try:
                report = await clean(
                    self._store,
                    self._runtime,
                    ManifestReader(self._store, self._runtime),
                    grace_s=self._options.clean_grace_s,
                    epoch=self._epoch,
                    dry_run=False,
                    live_writer_ids=self._live_writer_ids,
                    held=self._held,
                )
                _log.info(
                    "the cleaner has passed: %d of %d objects deleted, of %d bytes",
                    report.deleted,
                    report.objects,
                    report.orphan_bytes,
                )
            except Fenced as error:
                # For good, unless this driver begins another run.
                _log.warning("the cleaner ends: %s", error)
                return
            except DstlError as error:
                task = asyncio.current_task()
                if task is not None and task.cancelling():
                    # The pass was cut off and ended with an error of its own: close() waits for us.
                    return
                _log.warning("the cleaner was stopped, and will try again: %s", error)
            await self._runtime.clock.sleep(self._options.clean_interval_s)
