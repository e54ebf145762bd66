"""A restore that goes on behind batches: what a read needs is brought before it is answered."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import product
from typing import Any

import numpy as np

from dstl.errors import Closed, DstlError, Unavailable
from dstl.rpc.messages import (
    KEY_COLUMNS,
    AttemptCall,
    FetchDue,
    FetchEntries,
    FetchEntry,
    FetchMany,
    FetchValues,
    ScanEntries,
    ScanValues,
    read_columns,
)
from dstl.runtime import Runtime, end_tasks
from dstl.store.retry_policy import RetryPolicy
from materializer.bases.cold_reads import Asked
from materializer.bases.table_directory import FileBases
from materializer.restore.restore import TableRestore
from materializer.tables import HeapStateTable

_log = logging.getLogger(__name__)
_LONGEST_PAUSE_S = 10.0  # a store that is away for minutes is asked now and then, and those that wait are told


class BackgroundLoad:
    """Loads what a restore that was opened has not loaded yet. One event loop.

    A store that does not answer is asked again for as long as the tables are in use: reads that need it fail meanwhile,
    and the others go on. Anything else that goes wrong is kept, so that the next run restores again.

    Args:
        restore: The restore, which is open.
        files: Its files: closed at the end.
        runtime: Clock and jitter.
        finished: Called once all is loaded.

    Attributes:
        failure: What the load has failed with for good.
    """

    def __init__(self, restore: TableRestore, files: FileBases, runtime: Runtime, finished: Callable[[], None]) -> None:
        self.failure: DstlError | None = None
        self._restore = restore
        self._files = files
        self._retries = RetryPolicy(runtime, longest_s=_LONGEST_PAUSE_S)
        self._finished = finished
        self._task = asyncio.ensure_future(self._run())

    async def ready(self, operator: str, call: AttemptCall[Any]) -> None:
        """Have an operator's table show what a read asks for.

        Raises:
            DstlError: It cannot be had, for now or for good.
        """
        if self._restore.is_loaded:
            return
        if isinstance(call, FetchDue) and call.place is not None:
            self._check()
            # Its index is made from all of the table, that of timers key group by key group.
            await self._restore.wait(operator)
            return
        asked = _asked(call)
        if isinstance(call, (FetchMany, FetchValues)):
            asked = self._without_written(operator, asked)
        await self.bring(operator, asked)

    async def bring(self, operator: str, asked: Mapping[int, Iterable[Asked]]) -> None:
        """Have an operator's table show some keys.

        Raises:
            DstlError: They cannot be had, for now or for good.
        """
        self._check()
        try:
            await self._restore.bring(operator, asked)
        except Closed as error:
            raise replaced() from error

    async def ended(self) -> None:
        """Wait until it has ended, well or not."""
        await asyncio.shield(self._task)

    async def close(self) -> None:
        """Give up what is not loaded yet; reads that need it are refused from now on. Idempotent."""
        if self.failure is None and not self._restore.is_loaded:
            self.failure = replaced()
        await end_tasks([self._task])

    def _check(self) -> None:
        """Refuse to read tables that will never be whole: the query is to be restarted, not to go on with them."""
        if self.failure is not None:
            raise self.failure

    async def _run(self) -> None:
        try:
            await self._load()
        except DstlError as error:
            _log.error("the tables are loaded in part, and the next run restores them again: %s", error)
            self.failure = error
        except Exception as error:
            _log.exception("the tables are loaded in part, and the next run restores them again")
            self.failure = Closed(f"the restore has failed: {error}")
        finally:
            await self._restore.close()
            await self._files.close()
        if self.failure is None:
            self._finished()

    async def _load(self) -> None:
        attempt = 0
        while True:
            try:
                await self._restore.load()
                return
            except Unavailable as error:
                attempt += 1
                _log.warning("the rest of the tables cannot be loaded for now: %s", error)
                await self._retries.pause(attempt)

    def _without_written(self, operator: str, asked: Mapping[int, Sequence[Asked]]) -> dict[int, list[Asked]]:
        """Leave out keys whose values were written since the base: what it has of them is of no use."""
        table = self._restore.restored.tables.get(operator)
        left: dict[int, list[Asked]] = {}
        for group, keys in asked.items():
            if not isinstance(table, HeapStateTable) or not table.is_cold(group):
                continue
            for state in dict.fromkeys(state for state, _ in keys):
                mine = [key for of, key in keys if of == state and key is not None]
                found = table.get_many(state, [group] * len(mine), mine)
                left.setdefault(group, []).extend(
                    (state, key) for key, value in zip(mine, found, strict=True) if value is None
                )
        return left


def replaced() -> Unavailable:
    """Return the error of a read whose tables are on their way out."""
    return Unavailable("the tables are being replaced by those of another checkpoint: ask again")


def _asked(call: AttemptCall[Any]) -> dict[int, list[Asked]]:
    """Return what a read asks for, by key group."""
    asked: dict[int, list[Asked]] = {}
    rows: Iterable[tuple[int, Asked]] = ()
    if isinstance(call, FetchMany):
        keys = zip(call.key_groups, call.keys, strict=True)
        rows = ((group, (state, key)) for (group, key), state in product(keys, call.states))
    elif isinstance(call, FetchValues):
        groups, column = read_columns(memoryview(call.keys), KEY_COLUMNS)
        named = zip(np.asarray(groups).tolist(), column.to_pylist(), strict=True)
        rows = ((group, (call.state, key)) for group, key in named)
    elif isinstance(call, FetchEntries):
        rows = ((group, (call.state, key)) for group, key in zip(call.key_groups, call.keys, strict=True))
    elif isinstance(call, (FetchEntry, ScanEntries)):
        rows = [(call.key_group, (call.state, call.key))]
    elif isinstance(call, FetchDue):
        rows = [(group, (call.state, None)) for group in call.key_groups]
    elif isinstance(call, ScanValues):
        rows = [(call.key_group, (call.state, None))]
    for group, each in rows:
        asked.setdefault(group, []).append(each)
    return asked
