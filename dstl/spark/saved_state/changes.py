"""Changes of one state between two checkpoints: read from the log, or found by a comparison of both."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Literal

import pyarrow as pa
import pyarrow.compute as pc

from dstl.changelog.change_set import OP_CLEAR, OP_PUT
from dstl.checkpoint.manifest.reader import ManifestReader
from dstl.checkpoint.savepoint.creation import key_group_chunks
from dstl.errors import Invalid, MissingState
from dstl.runtime import Runtime
from dstl.spark.saved_state.reader import (
    Change,
    RowDecoder,
    StateColumns,
    StateRow,
    entries_of,
    find_operator,
    find_state,
    state_columns,
)
from dstl.state.descriptor import StateDescriptor, StateKind
from dstl.store.base import ObjectStore
from handles.checkpoint import CheckpointId, CompletedCheckpoint
from handles.key_group import KeyGroup, KeyGroupRange
from materializer.bases.table_directory import FileBases
from materializer.restore.log_replay import decoding_turn, replay, replay_steps
from materializer.restore.restore import heap_tables

Source = Literal["log", "comparison"]

_Place = tuple[KeyGroup, bytes]
"""Key group and key."""


@dataclass(slots=True)
class _Changed:
    """A key's rows: all of them cleared or not, and then by user key the value, None where it is gone."""

    is_cleared: bool = False
    values: dict[bytes, bytes | None] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ChangeSpan:
    """Two checkpoints, and the operator whose changes between them are read.

    Attributes:
        operator: The operator's uid.
        after: The earlier checkpoint; 0 for the empty state.
        to: The later one.
        before: The earlier one, where it is compared; None where the log goes back to it.
    """

    operator: str
    after: CheckpointId
    to: CompletedCheckpoint
    before: CompletedCheckpoint | None

    @property
    def source(self) -> Source:
        """The source of the changes."""
        return "log" if self.before is None else "comparison"

    def columns(self, state: str) -> StateColumns:
        """Return the types of the rows.

        Raises:
            Invalid: No such operator or state; names those that there are.
        """
        return replace(state_columns(self.to, self.operator, state), has_change=True)


async def find_span(
    store: ObjectStore, runtime: Runtime, operator: str, after: CheckpointId, to: CheckpointId | None
) -> ChangeSpan:
    """Return two checkpoints of a location. Only reads.

    Args:
        store: The location.
        runtime: Clock and jitter.
        operator: The operator's uid.
        after: The earlier one; 0 for the empty state before the first.
        to: The later one; None for the latest.

    Raises:
        Invalid: They are not one before the other, or there is no such operator.
        MissingState: One is not retained, and the log does not go back to it; says what there is.
        CorruptData: A record is damaged.
    """
    scan = await ManifestReader(store, runtime).scan()
    end = scan.choose(to, store.location)
    if not 0 <= after < end.checkpoint_id:
        raise Invalid(
            f"checkpoint {after} is not before checkpoint {end.checkpoint_id}: changes go from one to a later"
        )
    find_operator(end, operator)
    retained = {each.checkpoint_id: each for each in scan.retained}
    floor = max((each.checkpoint for each in end.truncated if each.operator == operator), default=0)
    # A number of which nothing is known may be that of a checkpoint that was made again under another one.
    is_known = after in retained or after in dict(end.logged_at) or after == floor
    # Of segments that do not say what they came with nothing can be told but all.
    is_whole = after == 0 or all(segment.checkpoint for segment in end.segments)
    if after >= floor and is_known and is_whole:
        return ChangeSpan(operator, after, end, None)
    if after not in retained:
        held = ", ".join(map(str, sorted(retained)))
        raise MissingState(
            f"what came behind checkpoint {after} is gone: {store.location} retains the checkpoints {held}, and the "
            f"log of operator {operator!r} goes back to checkpoint {floor}. Begin with one of those"
        )
    return ChangeSpan(operator, after, end, retained[after])


async def read_changes(store: ObjectStore, runtime: Runtime, span: ChangeSpan, state: str) -> AsyncGenerator[StateRow]:
    """Yield what has become of the rows of one state, of each row once, key group by key group.

    From the log, a row that was written is a ``put`` even where it has the value that it had, and a list or map that
    was emptied is one ``clear`` of its key, before what was put behind it. From a comparison, rows that are the same
    are none, and those of a map that are gone are each a ``delete``. Rows whose time to live has passed are left out.

    Raises:
        Invalid: There is no such state; names those that there are.
        CorruptData, MissingState: A checkpoint is damaged, or was subsumed by its running job meanwhile.
    """
    registry, descriptor = find_state(span.to, span.operator, state)
    decoder = RowDecoder(registry, descriptor, int(runtime.clock.wall() * 1000))
    async with FileBases(store, runtime) as files:
        for chunk in key_group_chunks(span.to):
            if span.before is None:
                found = await _logged(store, runtime, span, descriptor.state_id, chunk)
            else:
                found = await _compared(files, span, descriptor, chunk)
            for (_, key), changed in sorted(found.items(), key=lambda each: each[0]):
                for user_key, value, change in _told(changed, descriptor.kind):
                    if (row := decoder.row(key, user_key, value, change)) is not None:
                        yield row


def _told(changed: _Changed, kind: StateKind) -> Iterator[tuple[bytes, bytes | None, Change]]:
    if changed.is_cleared and kind in (StateKind.VALUE, StateKind.REDUCING, StateKind.AGGREGATING):
        changed.values.setdefault(b"", None)
    elif changed.is_cleared:
        yield b"", None, "clear"
    for user_key, value in sorted(changed.values.items(), key=lambda each: each[0]):
        yield user_key, value, "delete" if value is None else "put"


async def _logged(
    store: ObjectStore, runtime: Runtime, span: ChangeSpan, state: int, key_groups: KeyGroupRange
) -> dict[_Place, _Changed]:
    """Return the changes of some key groups that came with checkpoints behind the earlier one."""
    found: dict[_Place, _Changed] = {}
    contained = {span.operator: dict.fromkeys(key_groups, span.after)}
    steps = replay_steps(span.to, key_groups, contained, span.operator)
    async with aclosing(replay(steps, store, key_groups, runtime, decoding_turn())) as segments:
        async for _, changes in segments:
            for _, batch, _ in changes:
                _fold(found, batch.filter(pc.equal(batch.column("state"), pa.scalar(state, pa.uint16()))))
    return found


def _fold(found: dict[_Place, _Changed], changes: pa.RecordBatch) -> None:
    for row in changes.to_pylist():
        changed = found.setdefault((row["key_group"], row["key"]), _Changed())
        if row["op"] == OP_CLEAR:
            changed.is_cleared = True
            changed.values.clear()
        else:
            changed.values[row["user_key"]] = row["value"] if row["op"] == OP_PUT else None


async def _compared(
    files: FileBases, span: ChangeSpan, descriptor: StateDescriptor, key_groups: KeyGroupRange
) -> dict[_Place, _Changed]:
    """Return how the entries of some key groups differ in two checkpoints."""
    assert span.before is not None
    before, after = [
        await _entries(files, each, span.operator, descriptor.state_id, key_groups) for each in (span.before, span.to)
    ]
    found: dict[_Place, _Changed] = {}
    for place in before.keys() | after.keys():
        old, new = before.get(place, {}), after.get(place, {})
        values: dict[bytes, bytes | None] = {k: v for k, v in new.items() if old.get(k) != v}
        gone = old.keys() - new.keys()
        # An element of a list has no name by which it could be deleted, and goes with all that were there with it.
        is_cleared = descriptor.kind is StateKind.LIST and bool(gone) and len(gone) == len(old)
        if not is_cleared:
            values |= dict.fromkeys(gone)
        if values or is_cleared:
            found[place] = _Changed(is_cleared, values)
    return found


async def _entries(
    files: FileBases, checkpoint: CompletedCheckpoint, operator: str, state: int, key_groups: KeyGroupRange
) -> dict[_Place, dict[bytes, bytes]]:
    found: dict[_Place, dict[bytes, bytes]] = {}
    async with heap_tables(checkpoint, files, key_groups, operator) as tables:
        for group, (key, user_key, value) in entries_of(tables.get(operator), state):
            found.setdefault((group, key), {})[user_key] = value
    return found
