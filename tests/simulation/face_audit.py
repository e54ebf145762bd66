"""The audit of operators that a model runs beside the query: each attempt, checkpoint and output that counts.

The expected state follows the checkpoints' own lineage, for a batch's time is known only once a checkpoint says it:
from then on the batch must have that time whenever it runs again, or its output and its state are not of one run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from handles.checkpoint import CompletedCheckpoint
from handles.key_group import partition_of, range_of_partition
from materializer.tables.base import StateTable
from tests.simulation.clocked_model import (
    CLOCK_HOLD_MS,
    DELAY_MS,
    LOOK,
    TTL_MS,
    Batch,
    event_time_ms,
    run_model,
    sparks_watermark_ms,
)
from tests.simulation.evolving import WRONG
from tests.simulation.faces import (
    BRIEF,
    EVOLVING,
    SPARKS,
    Output,
    entries_of,
    face_operator,
    run_face,
    states_of,
    unexpired,
)
from tests.simulation.spark import CLOCKED, QueryLogs, TaskSpec, first_keys, key_group_of, keys_of

_LATER_MS = 1700


@dataclass(frozen=True)
class _Known:
    """A checkpoint as the model has it: what the next batch starts from."""

    batch_id: int
    time_ms: int
    watermark_ms: int
    late_watermark_ms: int
    states: Mapping[str, Any]
    output: Mapping[str, Output]
    held_since_ms: int | None = None
    committed_ms: float = 0.0
    by: tuple[str, int] = ("", 0)
    """The run, and how often a clock had been set when it committed: who agree in both have gone by one clock."""
    registries: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    unsure: frozenset[str] = frozenset()
    """Operators of which nobody can say what they show: time has gone back, and what had expired is there again unless
    it was swept."""


_NOTHING = _Known(-1, 0, 0, 0, {}, {})


@dataclass(frozen=True)
class _Batch:
    """A batch of one operator, as the model runs it."""

    uid: str
    states: Mapping[Any, Any]
    rows: Mapping[bytes, Sequence[int]]
    given: Batch
    key_groups: Sequence[int]
    most: int
    parent: int | None = None
    known: Mapping[str, Any] | None = None
    version: int = 0
    initial: Sequence[bytes] = ()

    @cached_property
    def ran(self) -> tuple[Mapping[Any, Any], Output]:
        """The states behind it, and what it must yield."""
        if self.uid in CLOCKED:
            return run_model(CLOCKED[self.uid], self.states, self.rows, self.given)
        sequence = (self.parent or 0) + 1
        version = self.version if self.uid == EVOLVING else 0
        return run_face(
            self.uid,
            self.states,
            self.rows,
            self.given,
            self.key_groups,
            self.most,
            self.known,
            sequence=sequence,
            version=version,
            initial=self.initial,
        )

    def output(self) -> Output:
        return self.ran[1]

    def after_a_sweep(self, key: bytes) -> Iterator[list[str] | None]:
        """Yield what a key may show as well: slots that an earlier batch found expired may be swept or not."""
        for left in self.states[key].swept() if self.uid in CLOCKED and key in self.states else ():
            yield replace(self, states={**self.states, key: left}).output().get(key)


class FaceAudit:
    """Compares every attempt, checkpoint and kept output of the operators with the model.

    Args:
        logs: The query's batches.
        operators: Uids of the operators; it does nothing where there are none.
        fail: Takes an invariant's number and what was observed.
        clock_jumps: Returns how often a clock was set so far.
        version_of: Returns the version of the program that a run is of.
    """

    def __init__(
        self,
        logs: QueryLogs,
        operators: Sequence[str],
        fail: Callable[[str, str], None],
        clock_jumps: Callable[[], int],
        version_of: Callable[[str], int],
    ) -> None:
        self.operators = operators
        self.compared = 0
        self._logs = logs
        self._fail = fail
        self._clock_jumps = clock_jumps
        self._version_of = version_of
        self._known: dict[int, _Known] = {}
        self._batches: dict[tuple[Any, ...], _Batch] = {}
        """All tasks of a batch are run at once, and once: of an attempt's output each key is looked at."""
        self._times: dict[int, tuple[int, int]] = {}
        self._outputs: dict[bytes, Output] = {}

    def landed(self, checkpoint: CompletedCheckpoint) -> None:
        """A checkpoint was committed: the model makes its batch, at the time that it says."""
        if not self.operators:
            return
        number, batch, time = checkpoint.checkpoint_id, checkpoint.batch_id, checkpoint.batch_time_ms
        parent = self._parent(checkpoint.parent)
        if parent is None or time is None:
            self._fail("I9", f"checkpoint {number} has parent {checkpoint.parent} and time {time}")
            return
        first, of = self._times.setdefault(batch, (time, number))
        if first != time:
            self._fail("I8", f"batch {batch} ran at {first} for checkpoint {of}, and at {time} for checkpoint {number}")
        by = checkpoint.run_id, self._clock_jumps()
        self._check_time(checkpoint, time, parent, by)
        operations = self._logs.range_of(batch)
        most = self._logs.max_parallelism
        version = self._version_of(checkpoint.run_id)
        if version < 0:
            self._fail("I21", f"checkpoint {number} is of a program whose states cannot follow the stored ones")
        ran = {
            uid: self._batch(
                uid, checkpoint.parent, batch, operations, self._given(uid, batch, time, parent), version
            ).ran
            for uid in self.operators
        }
        latest = max((event_time_ms(each) for each in operations), default=0)
        watermark = parent.watermark_ms
        times = [face_operator(uid, 1, most).event_time for uid in self.operators]
        if any(each is not None and each.follows is None for each in times):
            watermark = max(watermark, latest - DELAY_MS)
        self._known[number] = _Known(
            batch,
            time,
            watermark,
            parent.watermark_ms,
            {uid: states for uid, (states, _) in ran.items()},
            {uid: output for uid, (_, output) in ran.items()},
            checkpoint.held_since_ms,
            checkpoint.created_at * 1000,
            by,
            {each.uid: each.registry for each in checkpoint.operators},
            _unsure(parent, time),
        )
        if (checkpoint.watermark_ms or 0) != watermark:
            self._fail("I9", f"checkpoint {number} has watermark {checkpoint.watermark_ms}, not {watermark}")

    def _check_time(self, checkpoint: CompletedCheckpoint, time: int, parent: _Known, by: tuple[str, int]) -> None:
        """Time stands still only where a clock is behind, and for a while; it goes back only after that."""
        number, held, since = checkpoint.checkpoint_id, checkpoint.held_since_ms, parent.held_since_ms
        waited = 0 if since is None else time - since
        if time < parent.time_ms and waited < CLOCK_HOLD_MS:
            back = parent.time_ms - time
            self._fail("I9", f"checkpoint {number}: time goes back by {back} ms, after it stood still for {waited}")
        if held is None and not self._clock_jumps() and time > checkpoint.created_at * 1000:
            self._fail("I9", f"checkpoint {number} of {checkpoint.created_at * 1000:.0f} has a batch of {time}")
        if held is None:
            return
        if time != parent.time_ms or held >= time:
            self._fail("I9", f"checkpoint {number} is held at {time} since {held}, its parent ran at {parent.time_ms}")
        # Its batch has begun behind its parent's record, unless that has waited for the next offsets.
        waits = checkpoint.run_id in self._logs.deferring
        if not waits and held == since and by == parent.by and parent.committed_ms >= held + CLOCK_HOLD_MS:
            self._fail("I9", f"checkpoint {number} is held since {held}, and began after {parent.committed_ms:.0f}")

    def output(self, spec: TaskSpec, parent_id: int | None, given: Batch, output: Output) -> None:
        """An attempt has yielded this, on this parent: reads, writes and timers must be the model's."""
        parent = self._parent(parent_id)
        if parent is None:
            self._fail("I9", f"attempt {spec.attempt} builds on checkpoint {parent_id}, which was never committed")
            return
        expected = self._given(spec.operator, spec.batch, given.time_ms, parent, spec.run)
        if given != expected:
            self._fail("I9", f"attempt {spec.attempt} of batch {spec.batch} was given {given}, not {expected}")
        if spec.operator in _unsure(parent, given.time_ms):
            return
        groups = self._logs.max_parallelism
        owned, operations = range_of_partition(spec.slot, groups, spec.parallelism), self._logs.range_of
        batch = self._batch(
            spec.operator,
            parent_id,
            spec.batch,
            operations(spec.batch, spec.run),
            expected,
            self._version_of(spec.run),
        )
        right = {key: rows for key, rows in batch.output().items() if key_group_of(key, groups) in owned}
        wrong = [row for rows in output.values() for row in rows if WRONG in row]
        if wrong:
            self._fail("I7", f"attempt {spec.attempt} of {spec.operator} in batch {spec.batch}: {wrong[0]}")
        self._outputs[spec.writer] = self._compare(
            "I7", f"attempt {spec.attempt} of {spec.operator} in batch {spec.batch}", output, right, batch
        )

    def committed(self, checkpoint: CompletedCheckpoint, kept: Mapping[tuple[str, int], Sequence[TaskSpec]]) -> None:
        """Spark has committed a batch with the output of these attempts: the checkpoint must agree."""
        known, groups = self._known.get(checkpoint.checkpoint_id), self._logs.max_parallelism
        for (uid, slot), specs in kept.items() if known is not None else ():
            for spec in specs if uid in self.operators and uid not in known.unsure else ():  # type: ignore[union-attr]
                right = {
                    key: rows
                    for key, rows in known.output[uid].items()  # type: ignore[union-attr]
                    if partition_of(key_group_of(key, groups), groups, spec.parallelism) == slot
                }
                what = f"Spark has kept the output of attempt {spec.attempt} of {uid} in batch {spec.batch}, which"
                self._compare("I8", what, self._outputs.get(spec.writer, {}), right)

    def restored(self, checkpoint: CompletedCheckpoint, tables: Mapping[str, Sequence[StateTable]]) -> None:
        """A checkpoint was restored: what its states show, and what fires next, must be the model's."""
        known = self._known.get(checkpoint.checkpoint_id)
        if known is None:
            return
        rows, most = {key: [LOOK] for key in keys_of(self._logs)}, self._logs.max_parallelism
        later = Batch(known.time_ms + _LATER_MS, known.watermark_ms + _LATER_MS, 0)
        for entry in checkpoint.operators:
            if entry.uid not in self.operators or entry.uid in known.unsure:
                continue
            found, what = entries_of(tables.get(entry.uid, ()), states_of(entry.registry)), f"{entry.uid}, which"
            right, what = known.states[entry.uid], f"checkpoint {checkpoint.checkpoint_id} holds {what}"
            if entry.uid in CLOCKED:
                # Expired values may be swept or not: compared is what is shown.
                shown = run_face(entry.uid, found, rows, later, range(most), most, entry.registry)[1]
                batch = _Batch(entry.uid, right, rows, later, range(most), most)
                self._compare("I6", what, shown, batch.output(), batch)
                continue
            if entry.uid in BRIEF:
                found, right = (unexpired(each, known.time_ms - TTL_MS) for each in (found, right))
            if found != right:
                place = min(each for each in {*found, *right} if found.get(each) != right.get(each))
                self._fail("I6", f"{what} has {found.get(place)!r} at {place}, not {right.get(place)!r}")

    def _given(self, uid: str, batch: int, time_ms: int, parent: _Known, run: str = "") -> Batch:
        """Return the times of a batch of an operator: its watermarks are Spark's, or what the checkpoint says."""
        if uid == SPARKS:
            marks = (sparks_watermark_ms(self._logs, number, run) for number in (batch, batch - 1))
            return Batch(time_ms, *marks)
        return Batch(time_ms, parent.watermark_ms, parent.late_watermark_ms)

    def _parent(self, checkpoint_id: int | None) -> _Known | None:
        return self._known.get(checkpoint_id) if checkpoint_id else _NOTHING

    def _batch(
        self, uid: str, parent_id: int | None, batch: int, operations: range, given: Batch, version: int
    ) -> _Batch:
        """Return a batch of an operator on a checkpoint, which runs once."""
        at = uid, parent_id, batch, operations, given, version
        if at not in self._batches:
            parent, most = self._parent(parent_id), self._logs.max_parallelism
            assert parent is not None
            self._batches[at] = _Batch(
                uid,
                parent.states.get(uid, {}),
                self._rows(operations),
                given,
                range(most),
                most,
                parent_id,
                parent.registries.get(uid),
                version,
                first_keys(self._logs, batch),
            )
        return self._batches[at]

    def _rows(self, operations: range) -> dict[bytes, list[int]]:
        rows: dict[bytes, list[int]] = {}
        for operation in operations:
            rows.setdefault(self._logs.key_of(operation), []).append(operation)
        return rows

    def _compare(self, invariant: str, what: str, found: Output, right: Output, batch: _Batch | None = None) -> Output:
        """Return what the model has in the place of what was found; all differences are violations."""
        self.compared += 1
        for key in sorted({*found, *right}):
            if found.get(key) != right.get(key):
                if batch is not None and found.get(key) in batch.after_a_sweep(key):
                    continue
                self._fail(invariant, f"{what} shows {key!r} as {found.get(key)}, not {right.get(key)}")
                return found
        return right


def _unsure(parent: _Known, time_ms: int) -> frozenset[str]:
    return parent.unsure if time_ms >= parent.time_ms else frozenset(BRIEF)
