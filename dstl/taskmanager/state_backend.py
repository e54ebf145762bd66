"""The state of one TaskManager: the log, and overlays of what is not committed yet, over the committed tables.

Base tables never contain uncommitted state. What a task writes is its *attempt*: appended to the log and kept as a
pending overlay. When the checkpoint of its batch completes, the overlays that count are noted, and they are folded
into the tables when the next batch begins; until then the same batch can be run again from the same parent, and none of
its attempts is dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pyarrow as pa

from dstl.changelog.log_segment import PersistResult
from dstl.changelog.storage import StateChangelogStorage
from dstl.changelog.writer import StateChangelogWriter
from dstl.crash_points import reach
from dstl.errors import Invalid, Superseded, Unavailable
from dstl.rpc.fleet_messages import Persisted, PersistedPart
from dstl.runtime import Runtime
from dstl.taskmanager.background_load import BackgroundLoad
from dstl.taskmanager.base_tracker import BaseTracker, PendingBases
from dstl.taskmanager.memory_limit import MemoryLimit
from dstl.taskmanager.reads import CommittedTables
from handles.checkpoint import CheckpointId
from handles.key_group import KeyGroup, KeyGroupRange, range_of_partition
from handles.segment_handle import SegmentHandle, SequenceNumber
from materializer.bases.operator_bases import OperatorBases
from materializer.bases.table_directory import FileBases
from materializer.restore.restore import TableRestore
from materializer.tables import ENTRY_OVERHEAD_BYTES, Expired, StateTable

AttemptKey = tuple[str, int]
"""An operator's uid and a Spark task attempt id."""


@dataclass(slots=True)
class _Attempt:
    """One task attempt: its change sets in the log, and the overlay they will become."""

    operator: str
    batch_id: int
    parallelism: int
    writer: StateChangelogWriter | None = None
    from_sqn: SequenceNumber = 0
    partition: int | None = None
    has_ended: bool = False
    persisted: bool = False
    to_sqn: SequenceNumber = 0
    overlay: list[tuple[pa.RecordBatch, bool]] = field(default_factory=list)
    """Changes, and whether their times are new to an index by time."""


@dataclass(frozen=True, slots=True)
class _Persisted:
    """The answer to a persist, kept until the coordinator has told how the checkpoint ended."""

    keys: list[AttemptKey]
    result: PersistResult
    pending: PendingBases


class TaskManagerStateBackend:
    """All operators' state for the key groups of one TaskManager. One event loop; not thread-safe.

    Invariants:
        1. What :attr:`committed` shows is exactly the state of checkpoint :attr:`base`.
        2. A log's sequence numbers that a checkpoint names are dense: a writer with dropped changes is closed, and the
           partition's next attempt opens a log of its own.

    Args:
        storage: The log of this TaskManager.
        open_table: Makes an empty table for an operator.
        runtime: Source of log ids, and clock.
        tracker: As the attribute.
        max_parallelism: Number of key groups of the job.
        memory: Refuses changes that would outgrow it.

    Attributes:
        committed: The tables, and their indexes by time. ``size`` of one leaves out what waits to be folded in.
        tracker: Bases of the operators.
        loading: Loads what the tables have not got yet; None once they have all.
    """

    def __init__(
        self,
        storage: StateChangelogStorage,
        open_table: Callable[[str], StateTable],
        runtime: Runtime,
        *,
        tracker: BaseTracker,
        max_parallelism: int,
        memory: MemoryLimit,
    ) -> None:
        self.storage = storage
        self._memory, self._runtime = memory, runtime
        self._max_parallelism = max_parallelism
        self.committed = CommittedTables(open_table)
        self.size = self.committed.size
        self._attempts: dict[AttemptKey, _Attempt] = {}
        self._writers: dict[tuple[str, int], StateChangelogWriter] = {}
        self._persisted: _Persisted | None = None
        self._completed: tuple[CheckpointId, list[AttemptKey], PendingBases, int | None] | None = None
        self.tracker = tracker
        self.key_groups = KeyGroupRange.all(max_parallelism)
        self.base: CheckpointId | None = None
        self.loading: BackgroundLoad | None = None

    @property
    def bases(self) -> Mapping[str, OperatorBases]:
        """Bases and log by operator, as they are in checkpoint :attr:`base`."""
        return self.tracker.bases

    def expired(self, operator: str) -> Expired:
        """Return which values have outlived checkpoint :attr:`base`."""
        return self.tracker.expired(operator)

    def table(self, operator: str) -> StateTable:
        """Return an operator's committed table, an empty one for a new operator."""
        return self.committed.source(operator).table

    def can_resume(self, parent: CheckpointId | None) -> bool:
        """True where a run can go on from ``parent`` with the tables that are here, none of which has failed."""
        if self.committed.has_failed or (self.loading is not None and self.loading.failure is not None):
            return False
        return parent == self.base or (self._completed is not None and parent == self._completed[0])

    def resume(self, parent: CheckpointId | None) -> None:
        """Start a run on ``parent``: every attempt and log of the run before is dropped.

        Raises:
            Unavailable: The tables hold another checkpoint; they must be restored.
        """
        self._advance(parent)
        self._completed = None
        self.tracker.resumed()
        # What became of it is unknown here, so it is neither confirmed nor reset: its objects are left to the cleaner.
        self._persisted = None
        self._close_logs()

    def replace_tables(
        self,
        tables: dict[str, StateTable],
        base: CheckpointId | None,
        owned: KeyGroupRange,
        *,
        bases: Mapping[str, OperatorBases] | None = None,
        registries: Mapping[str, Mapping[str, object]] | None = None,
    ) -> None:
        """Take restored tables, and forget everything that was here before, of which nothing is being loaded any more.

        Args:
            tables: By operator.
            base: The checkpoint that they hold.
            owned: The key groups that they hold.
            bases: By operator, the bases that they were restored from and the log after them.
            registries: The operators' states as plain data.
        """
        self._completed = None
        self.base = base
        self.resume(base)
        self.committed.replace(tables)
        self.key_groups = owned
        self.tracker.replaced(dict(bases or {}), registries or {})

    def load_behind(self, restore: TableRestore, files: FileBases) -> BackgroundLoad:
        """Load what a restore whose tables were taken has not loaded yet.

        Args:
            restore: The restore.
            files: Its files: closed at the end.
        """

        def finished() -> None:
            self.loading = None
            self.tracker.loaded(restore.restored.replay_bytes_per_s)

        self.loading = BackgroundLoad(restore, files, self._runtime, finished)
        return self.loading

    async def end_loading(self) -> None:
        """Give up what is being loaded: the tables that are here lack it for good, and are to be replaced at once."""
        if self.loading is not None:
            # It stays here until its end, so that nothing reads what is half loaded.
            await self.loading.close()
            self.loading = None

    def open_attempt(self, key: AttemptKey, batch_id: int, parent: CheckpointId | None, parallelism: int) -> None:
        """Let an attempt read and write, on top of its parent checkpoint.

        Raises:
            Unavailable: The tables hold another checkpoint.
        """
        self._advance(parent)
        self._drop([k for k, a in self._attempts.items() if a.batch_id < batch_id])
        if key not in self._attempts:
            self._attempts[key] = _Attempt(key[0], batch_id, parallelism)

    def check_attempt(self, key: AttemptKey) -> None:
        """Refuse an attempt that is over.

        Raises:
            Superseded: Another attempt or batch has taken its place.
        """
        if key not in self._attempts:
            raise Superseded(
                f"attempt {key[1]} of operator {key[0]} is over: another attempt or batch has taken its place"
            )

    def write(
        self, key: AttemptKey, partition: int, changes: pa.RecordBatch, metadata: bytes, expiring: bool = False
    ) -> None:
        """Append a part of an attempt's change set to its log and its overlay.

        Args:
            key: The attempt.
            partition: Its partition: the same in every call.
            changes: Columns of ``CHANGE_SCHEMA``.
            metadata: The operator's states; goes into the log once per attempt, so that a segment explains itself. The
                first call has it, what later ones have is not looked at.
            expiring: The times of its puts are new to an index by time.

        Raises:
            Superseded: The attempt is over, or has been persisted.
            StateTooLarge: The memory has no room for them.
            Invalid: The changes are of another partition or TaskManager, or the attempt's first come without metadata.
        """
        self.check_attempt(key)
        attempt = self._attempts[key]
        if attempt.persisted:
            raise Superseded(f"attempt {key[1]} of operator {key[0]} has ended: its changes are in a checkpoint")
        self._check_key_groups(key, partition, changes)
        if self._memory.is_due(changes.get_total_buffer_size()):
            self._memory.check(self._growth(key[0], changes), f"operator {key[0]}: changes")
        if attempt.writer is None:
            if not metadata:
                # The part before this one was refused: its task will hear of that, and end.
                raise Invalid(f"operator {key[0]}: the first changes of attempt {key[1]} come without its states")
            attempt.writer = self._writer_for(attempt, partition)
            attempt.partition = partition
            attempt.from_sqn = attempt.writer.next_sequence_number()
            attempt.writer.append_metadata(metadata)
            self.tracker.declared(key[0], metadata)
        elif attempt.partition != partition:
            raise Invalid(
                f"operator {key[0]}: attempt {key[1]} writes to partitions {attempt.partition} and {partition}"
            )
        attempt.writer.append_batch(changes)
        attempt.overlay.append((changes, expiring))

    def end_changes(self, key: AttemptKey) -> None:
        """Encode what an attempt has written, for it will write no more.

        Of attempts at one partition only the first that ends: one is persisted, and mostly that one.

        Raises:
            Superseded: The attempt is over.
        """
        self.check_attempt(key)
        attempt = self._attempts[key]
        task = attempt.operator, attempt.partition, attempt.batch_id
        others = (each for each in self._attempts.values() if each.has_ended)
        if attempt.writer is not None and all((o.operator, o.partition, o.batch_id) != task for o in others):
            attempt.has_ended = True
            attempt.writer.encode_ahead()

    def look_up(
        self,
        checkpoint: CheckpointId,
        operator: str,
        state: int,
        key_group: KeyGroup,
        key: bytes,
        user_keys: Sequence[bytes] = (),
    ) -> dict[bytes, bytes]:
        """Return one key's values by user key as they are in a checkpoint: nothing that no checkpoint has.

        Args:
            checkpoint: The checkpoint.
            operator: The operator.
            state: The state's number.
            key_group: The key's.
            key: The key.
            user_keys: Of the values that are wanted; empty for all.

        Raises:
            Unavailable: The tables hold another checkpoint.
            Invalid: They are too much for one reply.
        """
        completed, winners = self._completed[:2] if self._completed else (self.base, [])
        if key_group not in self.key_groups or checkpoint not in (self.base, completed):
            raise Unavailable(
                f"this TaskManager holds key groups {self.key_groups} of checkpoint {completed}, not key group "
                f"{key_group} of {checkpoint}: ask again"
            )
        changes: list[tuple[pa.RecordBatch, bool]] = []
        if checkpoint == completed:
            won = [attempt for each in winners if (attempt := self._attempts[each]).operator == operator]
            changes = [part for attempt in won for part in attempt.overlay]
        return self.committed.source(operator).content(state, key_group, key, changes, user_keys)

    async def persist(self, winners: Mapping[str, Sequence[int]]) -> Persisted:
        """Make the winners' changes durable, or seal them to be inlined: at most one new segment.

        Raises:
            Unavailable: A winner's changes are not here any more, or the store took nothing.
        """
        chosen: list[tuple[AttemptKey, _Attempt]] = []
        for operator, attempt_ids in winners.items():
            for attempt_id in attempt_ids:
                attempt = self._attempts.get((operator, attempt_id))
                if attempt is None:
                    raise Unavailable(f"the changes of attempt {attempt_id} of {operator} are lost: restart the query")
                chosen.append(((operator, attempt_id), attempt))
        for _, attempt in chosen:
            attempt.persisted = True
        written = [(attempt, attempt.writer) for _, attempt in chosen if attempt.writer is not None]
        result = await self.storage.persist_all([(writer, attempt.from_sqn) for attempt, writer in written])
        part = PersistedPart()
        for attempt, writer in written:
            attempt.to_sqn = result.ranges[writer.log_id].to_sqn
            part.add(writer.log_id, attempt.operator, self._owned_part(attempt), result.segments[writer.log_id])
        pending = self.tracker.pending((a.operator, result.segments[w.log_id]) for a, w in written)
        self._persisted = _Persisted([key for key, _ in chosen], result, pending)
        open_logs = {*(w.log_id for w in self._writers.values()), *(w.log_id for _, w in written)}
        reports = tuple(finished.report for finished in pending.finished)
        return replace(part.finish(), materializations=reports, open_logs=tuple(sorted(open_logs)))

    def check_memory(self) -> None:
        """Look whether what is being restored still fits.

        Raises:
            StateTooLarge: It does not.
        """
        self._memory.check(0, "what is being restored")

    def complete(
        self,
        checkpoint_id: CheckpointId,
        winners: Mapping[str, Sequence[int]],
        located: Mapping[str, SegmentHandle],
        time_ms: int | None = None,
    ) -> None:
        """Record that the manifest is durable: the coordinator owns what it names.

        The batch's other attempts stay as they are until a later batch begins: a speculative copy may still be at work,
        and nothing that it does counts any more.

        Args:
            checkpoint_id: The checkpoint.
            winners: Per operator, the attempts whose changes it holds.
            located: By seal id, where an inlined segment lies now.
            time_ms: The batch's processing time, Unix milliseconds; None where it is not known.

        Raises:
            Unavailable: These winners were not persisted here: the tables must be restored.
        """
        keys = [(operator, attempt_id) for operator, ids in winners.items() for attempt_id in ids]
        persisted = self._persisted
        if persisted is None or persisted.keys != keys:
            raise Unavailable(f"checkpoint {checkpoint_id} was not persisted by this TaskManager: restore it")
        self._persisted = None
        self.storage.confirm(persisted.result, located)
        for key in keys:
            attempt = self._attempts[key]
            if attempt.writer is not None and attempt.partition is not None:
                self._writers[attempt.operator, attempt.partition] = attempt.writer
        self._completed = (checkpoint_id, keys, persisted.pending, time_ms)
        self.tracker.named(persisted.pending)

    def abort(self) -> None:
        """Record that the last persisted checkpoint failed: its changes are ours again and stay pending."""
        persisted, self._persisted = self._persisted, None
        if persisted is not None:
            self.storage.reset(persisted.result)

    def close(self) -> None:
        """Drop everything that no checkpoint has, and close tables and logs; nothing is being loaded. Idempotent."""
        self._close_logs()
        self.committed.replace({})

    def _advance(self, parent: CheckpointId | None) -> None:
        """Hand the completed overlays to the tables if the parent contains them."""
        if self._completed is not None and parent == self._completed[0]:
            self.base, keys, pending, time_ms = self._completed
            self._completed = None
            for key in keys:
                attempt = self._attempts.pop(key)
                self.committed.add(attempt.operator, attempt.overlay)
                if attempt.writer is not None:
                    # The coordinator's from now on; it is not asked for here again.
                    attempt.writer.truncate(attempt.to_sqn)
                    reach("T9")
            self.tracker.followed(self.base, pending, time_ms)
        if parent != self.base:
            raise Unavailable(
                f"this TaskManager holds the state of checkpoint {self.base}, not of {parent}: restore it"
            )

    def _growth(self, operator: str, changes: pa.RecordBatch) -> int:
        """Return about how many bytes these changes, and those that wait, will take beyond what they take now."""
        nbytes: int = changes.nbytes
        if self.committed.is_in_files(operator):
            return nbytes
        waiting: int = sum(part.num_rows for each in self._attempts.values() for part, _ in each.overlay)
        entries: int = changes.num_rows + waiting + self.committed.waiting_rows
        return nbytes + ENTRY_OVERHEAD_BYTES * entries

    def _writer_for(self, attempt: _Attempt, partition: int) -> StateChangelogWriter:
        """Return the partition's log if no other attempt uses it, else a log of its own."""
        current = self._writers.get((attempt.operator, partition))
        if current is not None and all(other.writer is not current for other in self._attempts.values()):
            return current
        return self.storage.create_writer(self._runtime.new_id())

    def _check_key_groups(self, key: AttemptKey, partition: int, changes: pa.RecordBatch) -> None:
        """Refuse changes where no restore would look for them."""
        if not changes.num_rows:
            return
        owned = range_of_partition(partition, self._max_parallelism, self._attempts[key].parallelism)
        found = np.asarray(changes.column("key_group"))
        low, high = int(found.min()), int(found.max())
        if low not in owned or high not in owned or low not in self.key_groups or high not in self.key_groups:
            raise Invalid(
                f"operator {key[0]}: attempt {key[1]} writes key groups {low}-{high}; partition {partition} has "
                f"{owned}, this TaskManager {self.key_groups}"
            )

    def _owned_part(self, attempt: _Attempt) -> KeyGroupRange:
        assert attempt.partition is not None
        of_partition = range_of_partition(attempt.partition, self._max_parallelism, attempt.parallelism)
        return of_partition.intersect(self.key_groups) or of_partition

    def _close_logs(self) -> None:
        self._drop(list(self._attempts))
        for writer in self._writers.values():
            writer.close()
        self._writers.clear()

    def _drop(self, keys: Sequence[AttemptKey]) -> None:
        """Drop attempts' changes from the log; a log that loses changes is closed, so that logs stay dense."""
        for key in keys:
            attempt = self._attempts.pop(key)
            if attempt.writer is not None and attempt.partition is not None:
                attempt.writer.truncate_and_close(attempt.from_sqn)
                if self._writers.get((attempt.operator, attempt.partition)) is attempt.writer:
                    del self._writers[attempt.operator, attempt.partition]
