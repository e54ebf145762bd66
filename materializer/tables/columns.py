"""Runs and pages: change batches are cut into runs of one owner, ordered rows into pages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from dstl.changelog.change_set import CHANGE_SCHEMA, OP_CLEAR, OP_DELETE
from dstl.column_buffers import bytes_of, common_width, empty_values, lengths_of, rows_of, value_offsets
from dstl.errors import Invalid
from handles.key_group import KeyGroup
from materializer.tables.base import ENTRY_SCHEMA, PAGE_BYTES, PAGE_ROWS, KeyGroups
from materializer.tables.key_places import FixedItems, Keys, names_of

_CHUNK = 1 << 10  # values: a millisecond without the interpreter's lock for others

_FEW = 32  # keys: as a list they are there sooner


def key_group_runs(key_groups: KeyGroups) -> Iterator[tuple[int, int, int]]:
    """Yield (key group, start, stop) for each run of equal key groups: half-open positions."""
    groups = np.asarray(key_groups)
    if not len(groups):
        return
    ends = (groups[1:] != groups[:-1]).nonzero()[0] + 1
    starts = [0, *ends.tolist()]
    yield from zip(groups.take(starts).tolist(), starts, [*starts[1:], len(groups)], strict=True)


@dataclass(frozen=True, slots=True)
class ChangeRun:
    """Neighbouring change records of one key group and state.

    Attributes:
        key_group: Key group of all of them.
        state: State id of all of them.
        ops: Operation of each; None when all are puts.
        named: Key of each.
        user_keys: User key of each; None when all are empty.
        stored: Value of each, side by side where all have one length; meaningless unless the operation is a put.
        value_width: Length of every value; None where they differ.
        deletes: All are deletions.
    """

    key_group: KeyGroup
    state: int
    ops: list[int] | None
    named: Keys
    user_keys: list[bytes] | None
    stored: list[bytes] | FixedItems
    value_width: int | None = None
    deletes: bool = False

    @property
    def keys(self) -> list[bytes]:
        """Key of each."""
        return names_of(self.named)

    @property
    def values(self) -> list[bytes]:
        """Value of each."""
        return self.stored if isinstance(self.stored, list) else self.stored.tolist()


def change_runs(changes: pa.RecordBatch) -> Iterator[ChangeRun]:
    """Check a batch of change records whole, then yield it run by run, keeping the order within each key.

    Raises:
        Invalid: A metadata record, an unknown operation, or a null.
    """
    columns = {name: changes.column(name) for name in CHANGE_SCHEMA.names}
    ops = np.asarray(columns["op"])
    if not len(ops):
        return iter(())
    if any(column.null_count for column in columns.values()):
        raise Invalid("a change record has a null: an absent user key or value is empty bytes")
    if int(ops.max()) > OP_CLEAR:
        raise Invalid(f"a state table has no operation {int(ops.max())}: give it puts, deletes and clears")
    owners = np.asarray(columns["key_group"]).astype(np.int64) << 16
    owners |= np.asarray(columns["state"]).astype(np.int64)
    runs = list(key_group_runs(owners))
    if len(runs) > 64 and len(runs) * 8 > len(ops):
        # Scattered: bring each owner's records together. The sort is stable, so a key's changes keep their
        # order.
        order = np.argsort(owners, kind="stable")
        owners, ops = owners[order], ops[order]
        columns = {name: column.take(pa.array(order)) for name, column in columns.items()}
        runs = list(key_group_runs(owners))
    return _runs(runs, ops, columns["key"], columns["user_key"], columns["value"])


def _runs(
    runs: list[tuple[int, int, int]],
    op_column: npt.NDArray[np.integer],
    names: pa.Array,
    user_names: pa.Array,
    stored: pa.Array,
) -> Iterator[ChangeRun]:
    # Whole columns become lists, or arrays, at once: slicing those is cheaper than slicing Arrow's when runs are short.
    keys = key_items(names)
    ops = op_column.tolist() if op_column.any() else None
    user_keys = None if is_all_empty(user_names) else user_names.to_pylist()
    offsets = value_offsets(stored)
    values, width = value_items(stored)
    for owner, start, stop in runs:
        run_ops = None if ops is None else ops[start:stop]
        deletes = run_ops is not None and run_ops.count(OP_DELETE) == stop - start
        run_user_keys = None if user_keys is None else user_keys[start:stop]
        yield ChangeRun(
            owner >> 16,
            owner & 0xFFFF,
            run_ops if run_ops is not None and any(run_ops) else None,
            keys[start:stop],
            run_user_keys if run_user_keys is not None and any(run_user_keys) else None,
            values[start:stop],
            # Of puts among deletions, whose values are empty, each run is looked at by itself.
            common_width(offsets[start : stop + 1]) if width is None and ops is not None else width,
            deletes,
        )


def is_all_empty(values: pa.Array) -> bool:
    """Return whether every value of a binary column without nulls has no bytes."""
    offsets = value_offsets(values)
    return bool(offsets[0] == offsets[-1])


def value_items(column: pa.Array) -> tuple[list[bytes] | FixedItems, int | None]:
    """Return the values of a binary column without nulls, and their length where all have one, else None.

    They are side by side, not copied, where they have one length that is not 0.
    """
    width = common_width(value_offsets(column))
    return (bytes_of(column).view(f"V{width}") if width else column.to_pylist()), width


def key_items(column: pa.Array) -> Keys:
    """Return the keys of a binary column without nulls, side by side where they are many and have one length."""
    if len(column) <= _FEW:
        return list(column.to_pylist())
    return value_items(column)[0]


def key_column(keys: Keys) -> pa.Array:
    """Return keys, or values, as one large binary array."""
    return rows_of(keys, pa.large_binary()) if isinstance(keys, np.ndarray) else binary_column(keys)


def binary_column(values: Sequence[bytes]) -> pa.Array:
    """Return values as one large binary array, letting other threads run now and then."""
    parts = [pa.array(values[at : at + _CHUNK], pa.large_binary()) for at in range(0, len(values) or 1, _CHUNK)]
    return pa.concat_arrays(parts) if len(parts) != 1 else parts[0]


class PageBuilder:
    """Cuts rows into pages of at most :data:`PAGE_ROWS`, and :data:`PAGE_BYTES` unless one row alone has more."""

    def __init__(self) -> None:
        self._parts: list[pa.RecordBatch] = []
        self._rows = self._bytes = 0

    def add(
        self,
        state: int,
        keys: pa.Array,
        user_keys: pa.Array | None,
        values: pa.Array,
        order: npt.NDArray[np.integer] | None = None,
    ) -> Iterator[pa.RecordBatch]:
        """Take rows of one state and yield the pages that they filled.

        Args:
            state: State id of all rows.
            keys: Large binary.
            user_keys: Large binary; None: all empty.
            values: Large binary.
            order: Positions of the rows in their right order; None: they are in order.
        """
        columns = [keys, values] if user_keys is None else [keys, user_keys, values]
        sizes = np.sum([lengths_of(column) for column in columns], axis=0)
        ends = np.cumsum(sizes if order is None else sizes[order])
        start, stop = 0, len(keys)
        while start < stop:
            done = int(ends[start - 1]) if start else 0
            fits = int(np.searchsorted(ends, done + PAGE_BYTES - self._bytes, side="right"))
            end = min(fits, start + PAGE_ROWS - self._rows, stop)
            if end <= start:
                if self._parts:
                    yield self._flush()
                    continue
                end = start + 1
            rows = slice(start, end) if order is None else pa.array(order[start:end])
            self._parts.append(_part(state, columns, rows))
            self._rows += end - start
            self._bytes += int(ends[end - 1]) - done
            start = end

    def finish(self) -> Iterator[pa.RecordBatch]:
        """Yield the last page, if rows are left."""
        if self._parts:
            yield self._flush()

    def _flush(self) -> pa.RecordBatch:
        page = self._parts[0] if len(self._parts) == 1 else pa.concat_batches(self._parts)
        self._parts, self._rows, self._bytes = [], 0, 0
        return page


def _part(state: int, columns: list[pa.Array], rows: slice | pa.Array) -> pa.RecordBatch:
    picked = [(column[rows] if isinstance(rows, slice) else column.take(rows)).cast(pa.binary()) for column in columns]
    count = len(picked[0])
    if len(picked) == 2:
        picked.insert(1, empty_values(count))
    states = pa.array(np.full(count, state, np.uint16))
    return pa.RecordBatch.from_arrays([states, *picked], schema=ENTRY_SCHEMA)
