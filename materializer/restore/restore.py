"""The restore of tables from a checkpoint: bases first, then the log after them, for the owned key groups."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial

import pyarrow as pa

from dstl.crash_points import reach
from dstl.errors import CorruptData, DstlError, MissingState
from dstl.runtime import Runtime, call_in_thread
from dstl.store.base import ObjectStore
from dstl.store.prefetcher import BudgetLease, Prefetcher
from handles.checkpoint import CompletedCheckpoint
from handles.key_group import KeyGroupRange
from handles.materialized_handle import Generations, generations_of
from materializer.bases.loading import LoadedBases, load_bases
from materializer.bases.operator_bases import LoggedChanges, OperatorBases
from materializer.bases.table_directory import FileBases
from materializer.restore.log_replay import LogPiece, ReplayStep, decoding_turn, join_segments, replay, replay_steps
from materializer.restore.progress import LogLine, ProgressListener, RestoreProgress
from materializer.tables import FileTable, StagedChanges, StateTable

MEASURABLE_BYTES = 4 << 20  # of fewer, latency is the larger part
_TOGETHER_ROWS = 1 << 16  # a table's own cost of a batch is small beside so many rows


@dataclass(frozen=True, slots=True)
class LogSizes:
    """Sizes by which a restore replays the log, in bytes of changes before compression.

    Attributes:
        piece: Applied together: a write buffer of RocksDB, so that a staged piece is as good a file as a flush.
        ahead: Made ready before the bases are loaded, or the pieces before are applied; staged pieces take none.
        staged: Less is applied as it is: a file for it would be one more for every read to look into.
    """

    piece: int = 32 << 20
    ahead: int = 64 << 20
    staged: int = 1 << 20


LOG_SIZES = LogSizes()


@dataclass(slots=True)
class RestoredTables:
    """The tables that a restore has built.

    Attributes:
        tables: By operator; an operator whose owned key groups are empty may be missing.
        bases: By operator, what its tables were loaded from and the log after it.
        bytes: Bytes of base files and segments that were read.
        changes: Change records applied.
        fallbacks: Base files that were damaged or missing, so that older ones and more log were read.
        replay_bytes_per_s: How fast it was; None where it was too little to tell.
    """

    tables: dict[str, StateTable] = field(default_factory=dict)
    bases: dict[str, OperatorBases] = field(default_factory=dict)
    bytes: int = 0
    changes: int = 0
    fallbacks: tuple[str, ...] = ()
    replay_bytes_per_s: float | None = None


async def restore_tables(
    checkpoint: CompletedCheckpoint | None,
    store: ObjectStore,
    owned: KeyGroupRange,
    open_table: Callable[[str], StateTable],
    runtime: Runtime,
    *,
    on_progress: ProgressListener | None = None,
    files: FileBases | None = None,
) -> RestoredTables:
    """Build the tables of a checkpoint for some key groups; restoring twice gives the same.

    First every operator's base files, each key group from the newest one that can be read; then the segments that came
    with a later checkpoint than the base of any of their key groups, in the checkpoint's order, which is the order of
    their commits. Several objects are fetched ahead, within a fixed budget of bytes; what holds none of the owned key
    groups is not opened. Tables are written in threads, one call at a time each.

    Args:
        checkpoint: What to restore; None for an empty state.
        store: Where its objects are.
        owned: Key groups to restore, inclusive.
        open_table: Makes an empty table for an operator.
        runtime: Clock, and jitter for repeated reads.
        on_progress: Told after every object; by default a log line every few seconds. What it raises ends the restore.
        files: Fetches bases that are a table's own files, and knows the host's cache; a restore in several pieces gives
            the same to all of them, and closes it. By default one without a cache.

    Raises:
        CorruptData: A segment is damaged, or every base of a key group is; names it, the checkpoint and the next step.
        MissingState: A segment, or a part of one, is not there.
        Unavailable: The store did not answer several times in a row.
        Invalid: A later version of DSTL wrote a segment.
    """
    if checkpoint is None:
        return RestoredTables()
    fetcher = files or FileBases(store, runtime)
    restore = _Restore(checkpoint, fetcher, owned, open_table, on_progress or LogLine())
    try:
        return await restore.run()
    except BaseException as error:
        for table in restore.restored.tables.values():
            table.close()
        if isinstance(error, DstlError):
            raise _explain(checkpoint, error) from error
        raise
    finally:
        if fetcher is not files:
            await fetcher.close()


def _explain(checkpoint: CompletedCheckpoint, error: DstlError) -> DstlError:
    what = f"checkpoint {checkpoint.checkpoint_id} (batch {checkpoint.batch_id}) cannot be restored: {error}"
    if isinstance(error, (CorruptData, MissingState)):
        what += (
            ". Bring the object back from a replica, or go back to an older checkpoint with "
            'StateBackend(..., restore="previous")'
        )
    # Of an error with more arguments than what it says, the kind that callers know.
    kind: type[DstlError] = next(kind for kind in type(error).__mro__ if kind.__module__ == DstlError.__module__)
    return kind(what)


class _Restore:
    """One restore under way."""

    def __init__(
        self,
        checkpoint: CompletedCheckpoint,
        files: FileBases,
        owned: KeyGroupRange,
        open_table: Callable[[str], StateTable],
        on_progress: ProgressListener,
    ) -> None:
        self._checkpoint = checkpoint
        self._files = files
        self._runtime = files.runtime
        self._owned = owned
        self._open_table = open_table
        self._on_progress = on_progress
        self._turn = decoding_turn()
        self._progress = RestoreProgress({}, self._runtime.clock.now())
        self._log: dict[str, list[LoggedChanges]] = {}
        self.restored = RestoredTables()

    async def run(self) -> RestoredTables:
        """Load, then replay."""
        started = self._runtime.clock.now()
        generations = {
            operator: {group: bases for group, bases in groups.items() if group in self._owned}
            for operator, groups in generations_of(self._checkpoint.materialized).items()
        }
        newest = {
            operator: {group: bases[0].checkpoint for group, bases in groups.items()}
            for operator, groups in generations.items()
        }
        steps = replay_steps(self._checkpoint, self._owned, newest)
        for operator, groups in generations.items():
            self._progress.more(operator, sum(bases[0].length for bases in groups.values()))
        self._expect(steps, 1)
        log = self._pieces(steps)
        try:
            loaded = await self._load(generations)
            if any(each.damaged for each in loaded.values()):
                await log.aclose()
                self._expect(steps, -1)
                after = {op: {g: base.checkpoint for g, base in each.loaded.items()} for op, each in loaded.items()}
                steps = replay_steps(self._checkpoint, self._owned, after)
                self._expect(steps, 1)
                log = self._pieces(steps)
            async for piece in log:
                await self._replay(piece)
                reach("R3")
        finally:
            await log.aclose()
        restored = self.restored
        for table in restored.tables.values():
            _resume(table)
        for operator in sorted({*generations, *self._log}):
            of = loaded.get(operator, LoadedBases())
            restored.bases[operator] = OperatorBases(
                generations.get(operator), of.versions, of.damaged, self._log.get(operator, ())
            )
        restored.fallbacks = tuple(sorted({name for each in loaded.values() for name in each.damaged}))
        seconds = self._runtime.clock.now() - started
        if restored.bytes >= MEASURABLE_BYTES and seconds > 0:
            restored.replay_bytes_per_s = restored.bytes / seconds
        self._on_progress(self._progress.status(self._runtime.clock.now(), finished=True))
        return restored

    def _pieces(self, steps: Sequence[ReplayStep]) -> Prefetcher[LogPiece, LogPiece]:
        segments = replay(steps, self._files.store, self._owned, self._runtime, self._turn)
        return Prefetcher(
            self._prepare(join_segments(segments, LOG_SIZES.piece)),
            _same,
            cost=lambda piece: piece.nbytes,
            max_bytes=LOG_SIZES.ahead,
            discard=LogPiece.discard,
        )

    async def _load(self, generations: Mapping[str, Generations]) -> dict[str, LoadedBases]:
        loaded: dict[str, LoadedBases] = {}
        for operator, groups in generations.items():
            if groups:
                loaded[operator] = await load_bases(
                    groups,
                    self._owned,
                    self._table(operator),
                    self._files,
                    partial(self._advance, operator),
                    self._turn,
                )
                self._check_loaded(operator, loaded[operator])
        return loaded

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

    def _check_loaded(self, operator: str, loaded: LoadedBases) -> None:
        """Refuse to go on where no base of a key group could be read and the log does not go back to the beginning."""
        for entry in self._checkpoint.truncated:
            lost = [g for g in entry.key_groups if g in self._owned and g not in loaded.loaded]
            if entry.operator == operator and lost:
                names = ", ".join(sorted(loaded.damaged))
                raise CorruptData(f"every base of key group {lost[0]} of {operator} is damaged or missing: {names}")

    async def _prepare(self, pieces: AsyncGenerator[LogPiece]) -> AsyncGenerator[LogPiece]:
        """Have a table write pieces of the log down, while its bases come or the pieces before are taken in.

        Also where the bases are there first: to put the changes one by one, which merges files on the way, takes more
        processor time than a file that is merged once.
        """
        async with aclosing(pieces):
            async for piece in pieces:
                for operator, batches in list(piece.changes.items()):
                    table = self._table(operator).as_files
                    if table is not None and piece.nbytes >= LOG_SIZES.staged:
                        staged = await call_in_thread(_stage, table, batches)
                        if staged is not None:
                            piece.stage(operator, staged)
                yield piece

    async def _replay(self, piece: LogPiece) -> None:
        for operator, batches in piece.changes.items():
            _resume(self._table(operator))
            await call_in_thread(_apply, self._table(operator), batches)
            reach("R5")
        for staged in piece.staged.values():
            await call_in_thread(staged.apply)
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
    if table.as_files is not None:
        table.as_files.resume_compaction()


def _apply(table: StateTable, batches: Sequence[pa.RecordBatch]) -> None:
    """Runs in a thread."""
    for batch in _join_batches(batches):
        table.apply(batch)


def _stage(table: FileTable, batches: Sequence[pa.RecordBatch]) -> StagedChanges | None:
    """Runs in a thread."""
    return table.stage(list(_join_batches(batches)))


def _join_batches(batches: Sequence[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Yield many small batches, which the blocks of segments are cut into, as few larger ones."""
    few: list[pa.RecordBatch] = []
    rows = 0
    for batch in batches:
        few.append(batch)
        rows += batch.num_rows
        if rows >= _TOGETHER_ROWS:
            yield pa.concat_batches(few)
            few, rows = [], 0
    if few:
        yield pa.concat_batches(few)
