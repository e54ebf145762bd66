"""The restore of tables from a checkpoint: the log is replayed, then the tables serve, and bases come behind them.

A table in memory takes the log first and answers from then on: what a read needs is brought before it, out of bases in
place or by loading its key groups first. Any other table has its bases loaded before the log. Either way a restore ends
when all is loaded.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial

import pyarrow as pa

from dstl.crash_points import reach
from dstl.errors import Closed, CorruptData, DstlError, MissingState, Unavailable
from dstl.runtime import call_in_thread, end_tasks
from dstl.store.prefetcher import BudgetLease, Prefetcher
from handles.checkpoint import CheckpointId, CompletedCheckpoint
from handles.key_group import KeyGroup, KeyGroupRange
from handles.materialized_handle import Generations, generations_of
from materializer.bases.base_cache import BaseSource
from materializer.bases.cold_reads import Asked, ColdReads, requests_at_once
from materializer.bases.loading import BaseLoad
from materializer.bases.operator_bases import LoggedChanges, OperatorBases
from materializer.bases.table_directory import FileBases
from materializer.restore.log_replay import (
    LogPiece,
    ReplayStep,
    decoding_turn,
    join_batches,
    join_segments,
    replay,
    replay_steps,
)
from materializer.restore.progress import LogLine, ProgressListener, RestoreProgress
from materializer.tables import HeapStateTable, RocksDBStateTable, StateTable
from materializer.tables.rocksdb_snapshot import SortedFile

MEASURABLE_BYTES = 4 << 20  # of fewer, latency is the larger part


PIECE_BYTES = 32 << 20
"""Bytes of changes, before compression, that are applied together: a write buffer of RocksDB, so that a staged piece is
as good a file as a flush."""
PREPARED_BYTES = 64 << 20
"""Bytes of changes made ready before the bases are loaded, or the pieces before applied; staged pieces take none."""
STAGED_BYTES = 1 << 20
"""Fewer are applied as they are: a file for them would be one more for every read to look into."""


@dataclass(slots=True)
class RestoredTables:
    """The tables that a restore has built.

    Attributes:
        tables: By operator; an operator whose owned key groups are empty may be missing.
        bases: By operator, what its tables were loaded from and the log after it.
        bytes: Bytes of base files and segments that were read.
        changes: Change records applied.
        replay_bytes_per_s: How fast it was; None where it was too little to tell.
    """

    tables: dict[str, StateTable] = field(default_factory=dict)
    bases: dict[str, OperatorBases] = field(default_factory=dict)
    bytes: int = 0
    changes: int = 0
    replay_bytes_per_s: float | None = None


@asynccontextmanager
async def heap_tables(
    checkpoint: CompletedCheckpoint, files: FileBases, key_groups: KeyGroupRange, operator: str | None = None
) -> AsyncIterator[dict[str, StateTable]]:
    """Give the tables of a checkpoint for some key groups, in memory and by operator; what is left there is closed.

    With ``operator`` that of this one alone.

    Raises:
        CorruptData: A segment is damaged, or every base of a key group is; names it, the checkpoint and the next step.
        MissingState: A segment, or a part of one, is not there.
        Unavailable: The store did not answer several times in a row.
        Invalid: A later version of DSTL wrote a segment.
    """
    restore = TableRestore(checkpoint, files, key_groups, lambda _: HeapStateTable(), LogLine(), operator)
    try:
        await restore.open()
        await restore.load()
        yield restore.restored.tables
    finally:
        await restore.close()
        restore.close_tables()


class TableRestore:
    """One restore: :meth:`open` gives tables that can be used, :meth:`load` ends when nothing is missing.

    First the segments that came with a later checkpoint than the newest base of any of their key groups, in the
    checkpoint's order, which is the order of their commits; behind them every operator's base files, each key group
    from the newest one that can be read. Where that is an older one, the log between the two comes too. Several objects
    are fetched ahead, within a fixed budget of bytes; what holds none of the owned key groups is not opened. Tables are
    written in threads, one call at a time each, until they are open; from then on, on the loop alone. One event loop.

    Args:
        checkpoint: What to restore; None for an empty state.
        files: Fetches bases, and knows the host's cache; its maker closes it, after this.
        owned: Key groups to restore, inclusive.
        open_table: Makes an empty table for an operator.
        on_progress: Told after every object. What it raises ends the restore.
        operator: Which one to restore; None for all.

    Attributes:
        restored: The tables, and what is known of the restore so far.
    """

    def __init__(
        self,
        checkpoint: CompletedCheckpoint | None,
        files: FileBases,
        owned: KeyGroupRange,
        open_table: Callable[[str], StateTable],
        on_progress: ProgressListener,
        operator: str | None = None,
    ) -> None:
        self._checkpoint = checkpoint
        self._operator = operator
        self._files = files
        self._runtime = files.runtime
        self._owned = owned
        self._open_table = open_table
        self._on_progress = on_progress
        self._turn, self._requests = decoding_turn(), requests_at_once()
        self._began = self._runtime.clock.now()
        self._progress = RestoreProgress({}, self._began)
        self._log: dict[str, list[LoggedChanges]] = {}
        self._loads: dict[str, BaseLoad] = {}
        self._reads: dict[str, ColdReads] = {}
        self._running: dict[str, asyncio.Task[None]] = {}
        self.restored = RestoredTables()

    @property
    def is_loaded(self) -> bool:
        """True once nothing is missing."""
        return all(load.is_done for load in self._loads.values())

    async def open(self, *, serves: bool = False) -> None:
        """Replay the log; lazy tables can be used then, and the others have their bases.

        Args:
            serves: Keys will be asked for before all is loaded, so indexes of bases come beside the log.

        Raises:
            DstlError: As :func:`heap_tables`.
        """
        if self._checkpoint is None:
            return
        try:
            await self._open(self._checkpoint, serves)
        except DstlError as error:
            raise self._explain(error) from error

    async def load(self) -> None:
        """Return once all is loaded. May be called again after it has failed with ``Unavailable``.

        Raises:
            DstlError: As :func:`heap_tables`; those that wait for a key group have been told, too.
        """
        if self._checkpoint is None:
            return
        try:
            for operator in self._loads:
                self._start(operator)
            await asyncio.gather(*self._running.values())
        except BaseException as error:
            await end_tasks(self._running.values())
            told = error if isinstance(error, DstlError) else Closed("the restore was given up")
            for load in self._loads.values():
                load.fail(self._explain(told), for_good=not isinstance(error, Unavailable))
            if isinstance(error, DstlError):
                raise self._explain(error) from error
            raise
        restored = self.restored
        for operator, load in self._loads.items():
            restored.bases[operator].loaded(load.versions, load.damaged)
        now = self._runtime.clock.now()
        if restored.bytes >= MEASURABLE_BYTES and now > self._began:
            restored.replay_bytes_per_s = restored.bytes / (now - self._began)
        self._on_progress(self._progress.status(now, finished=True))

    async def bring(self, operator: str, asked: Mapping[KeyGroup, Iterable[Asked]]) -> None:
        """Have an operator's table show some keys as they are.

        Raises:
            DstlError: As :func:`heap_tables`.
        """
        if operator in self._reads and not self._loads[operator].is_done:
            await self._reads[operator].bring(asked)

    async def wait(self, operator: str) -> None:
        """Return once all of an operator's key groups are loaded; they are loaded before others.

        Raises:
            DstlError: What the load has failed with meanwhile.
        """
        if operator in self._loads:
            await self._loads[operator].wait(self._owned)

    async def close(self) -> None:
        """End what runs; the tables stay as they are, and who waits for more is told. Idempotent."""
        await end_tasks(self._running.values())
        for load in self._loads.values():
            load.fail(Closed("the restore was given up"), for_good=True)
        for reads in self._reads.values():
            await reads.close()

    def close_tables(self) -> None:
        """Close the tables."""
        for table in self.restored.tables.values():
            table.close()

    def _explain(self, error: DstlError) -> DstlError:
        assert self._checkpoint is not None
        number, batch = self._checkpoint.checkpoint_id, self._checkpoint.batch_id
        what = f"checkpoint {number} (batch {batch}) cannot be restored: {error}"
        if isinstance(error, (CorruptData, MissingState)):
            what += (
                ". Bring the object back from a replica, or go back to an older checkpoint with "
                'StateBackend(..., restore="previous")'
            )
        # Of an error with more arguments than what it says, the kind that callers know.
        kind: type[DstlError] = next(kind for kind in type(error).__mro__ if kind.__module__ == DstlError.__module__)
        return kind(what)

    def _start(self, operator: str) -> None:
        load, task = self._loads[operator], self._running.get(operator)
        if task is not None and task.done() and not task.cancelled():
            task.exception()  # it may have failed before anybody waited for it
        if task is None or (task.done() and not load.is_done):
            self._running[operator] = asyncio.ensure_future(load.run())

    async def _open(self, checkpoint: CompletedCheckpoint, serves: bool) -> None:
        generations = {
            operator: {group: bases for group, bases in groups.items() if group in self._owned}
            for operator, groups in generations_of(checkpoint.materialized).items()
            if self._operator in (None, operator)
        }
        after = {
            operator: {group: bases[0].checkpoint for group, bases in groups.items()}
            for operator, groups in generations.items()
        }
        steps = replay_steps(checkpoint, self._owned, after, self._operator)
        for operator, groups in generations.items():
            self._progress.more(operator, sum(bases[0].length for bases in groups.values()))
        self._expect(steps, 1)
        log = self._pieces(steps)
        try:
            for operator, groups in generations.items():
                if groups:
                    self._begin(operator, groups)
            if serves:
                for reads in self._reads.values():
                    reads.prepare()
            first = {operator: load for operator, load in self._loads.items() if not load.is_lazy}
            for operator, load in first.items():
                await load.run()
                self._check_found(operator, load.lost)
            if any(load.damaged for load in first.values()):
                await log.aclose()
                self._expect(steps, -1)
                after |= {op: {g: b.checkpoint for g, b in load.loaded.items()} for op, load in first.items()}
                steps = replay_steps(checkpoint, self._owned, after, self._operator)
                self._expect(steps, 1)
                log = self._pieces(steps)
            async for piece in log:
                await self._replay(piece)
                reach("R3")
        finally:
            await log.aclose()
        for table in self.restored.tables.values():
            _resume(table)
        for operator in sorted({*generations, *self._log}):
            self.restored.bases[operator] = OperatorBases(
                generations.get(operator), log=self._log.get(operator, ()), is_loading=operator in self._loads
            )
        for load in self._loads.values():
            load.begins.set()

    def _begin(self, operator: str, groups: Generations) -> None:
        table = self._table(operator)
        load = self._loads[operator] = BaseLoad(
            groups,
            self._owned,
            table,
            self._files,
            partial(self._advance, operator),
            self._turn,
            partial(self._older_log, operator) if isinstance(table, HeapStateTable) else None,
        )
        if isinstance(table, HeapStateTable):
            source = BaseSource(self._files.store, self._runtime, self._files.cache, fills=False)
            newest = {group: bases[0] for group, bases in groups.items()}
            self._reads[operator] = ColdReads(load, table, newest, source, self._requests, self._turn)
            # It fetches while the log is replayed, and waits with what it has.
            self._start(operator)

    async def _older_log(self, operator: str, group: KeyGroup, after: CheckpointId) -> list[pa.RecordBatch]:
        """Return a key group's log behind an older base; 0: all of it, which it must go back to the beginning for."""
        assert self._checkpoint is not None
        if not after:
            self._check_found(operator, [group])
        mine = KeyGroupRange(group, group)
        steps = replay_steps(self._checkpoint, mine, {operator: {group: after}}, operator)
        found: list[pa.RecordBatch] = []
        async with aclosing(replay(steps, self._files.store, mine, self._runtime, self._turn)) as segments:
            async for _, changes in segments:
                found += [batch for _, batch, _ in changes]
        return found

    def _pieces(self, steps: Sequence[ReplayStep]) -> Prefetcher[LogPiece, LogPiece]:
        segments = replay(steps, self._files.store, self._owned, self._runtime, self._turn)
        return Prefetcher(
            self._prepare(join_segments(segments, PIECE_BYTES)),
            _same,
            cost=lambda piece: piece.nbytes,
            max_bytes=PREPARED_BYTES,
            discard=LogPiece.discard,
        )

    def _table(self, operator: str) -> StateTable:
        if operator not in self.restored.tables:
            self.restored.tables[operator] = self._open_table(operator)
        return self.restored.tables[operator]

    def _expect(self, steps: Sequence[ReplayStep], sign: int) -> None:
        for step in steps:
            for operator, share in _shares(step).items():
                self._progress.more(operator, sign * share)

    def _advance(self, operator: str, nbytes: int) -> None:
        now = self._runtime.clock.now()
        self.restored.bytes += nbytes
        self._progress.add(operator, nbytes, now)
        self._on_progress(self._progress.status(now))

    def _check_found(self, operator: str, lost: Sequence[KeyGroup]) -> None:
        """Refuse to go on where no base of a key group could be read and the log does not go back to the beginning."""
        assert self._checkpoint is not None
        for entry in self._checkpoint.truncated:
            gone = [group for group in lost if group in entry.key_groups]
            if entry.operator == operator and gone:
                names = ", ".join(sorted(self._loads[operator].damaged))
                raise CorruptData(f"every base of key group {gone[0]} of {operator} is damaged or missing: {names}")

    async def _prepare(self, pieces: AsyncGenerator[LogPiece]) -> AsyncGenerator[LogPiece]:
        """Have a table write pieces of the log down, while its bases come or the pieces before are taken in.

        Also where the bases are there first: to put the changes one by one, which merges files on the way, takes more
        processor time than a file that is merged once.
        """
        async with aclosing(pieces):
            async for piece in pieces:
                for operator, batches in list(piece.changes.items()):
                    table = self._table(operator)
                    if isinstance(table, RocksDBStateTable) and piece.nbytes >= STAGED_BYTES:
                        staged = await call_in_thread(_stage, table, batches)
                        if staged is not None:
                            piece.stage(operator, staged)
                yield piece

    async def _replay(self, piece: LogPiece) -> None:
        for operator, batches in piece.changes.items():
            _resume(self._table(operator))
            await call_in_thread(_apply, self._table(operator), batches)
            reach("R5")
        for operator, staged in piece.staged.items():
            table = self._table(operator)
            assert isinstance(table, RocksDBStateTable)
            await call_in_thread(table.take, staged)
        assert self._checkpoint is not None
        clock, times = self._runtime.clock, dict(self._checkpoint.logged_at)
        now, wall = clock.now(), clock.wall()
        for step, rows in piece.steps:
            # However wrong the clocks are, nothing was logged later than now.
            age = max(0.0, wall - times.get(step.entry.checkpoint, wall))
            self.restored.changes += sum(rows.values())
            total = max(1, sum(rows.values()))
            for operator, count in rows.items():
                # At least one byte: a log that may hold these key groups is not free of them until they have a base.
                stored = max(1, step.entry.handle.size * count // total)
                self._log.setdefault(operator, []).append(LoggedChanges(step.entry.checkpoint, stored, 1, now - age))
            for operator, share in _shares(step).items():
                self._advance(operator, share)


def _shares(step: ReplayStep) -> Mapping[str, int]:
    """Return the segment's bytes by operator; an equal share each, for what each has is known once it is read."""
    operators = sorted({operator for operator, _ in step.operators.values()})
    size, count = step.entry.handle.size, len(operators)
    return {operator: size * (at + 1) // count - size * at // count for at, operator in enumerate(operators)}


async def _same(piece: LogPiece, _: BudgetLease) -> LogPiece:
    return piece


def _resume(table: StateTable) -> None:
    """Let a table merge its files: whatever is put one by one may be so much that it must keep up with it."""
    if isinstance(table, RocksDBStateTable):
        table.resume_compaction()


def _apply(table: StateTable, batches: Sequence[pa.RecordBatch]) -> None:
    """Runs in a thread."""
    for batch in join_batches(batches):
        table.apply(batch)


def _stage(table: RocksDBStateTable, batches: Sequence[pa.RecordBatch]) -> SortedFile | None:
    """Runs in a thread."""
    return table.stage(list(join_batches(batches)))
