"""The changes of one log under one sequence number, while they are being collected.

A change is one row of :data:`CHANGE_SCHEMA`. Batches are kept as they come, without a copy.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import pyarrow as pa

from dstl.column_buffers import value_offsets
from dstl.errors import Invalid
from handles.key_group import MAX_MAX_PARALLELISM

CHANGE_SCHEMA: pa.Schema = pa.schema(
    [
        pa.field("key_group", pa.uint16(), nullable=False),
        pa.field("state", pa.uint16(), nullable=False),
        pa.field("op", pa.uint8(), nullable=False),
        pa.field("key", pa.binary(), nullable=False),
        pa.field("user_key", pa.binary(), nullable=False),
        pa.field("value", pa.binary(), nullable=False),
    ]
)
"""The columns of a batch of changes. No nulls; an absent user key or value is empty."""

OP_PUT = 0
"""``value`` replaces what (state, key, user key) had."""
OP_DELETE = 1
"""(state, key, user key) is gone."""
OP_CLEAR = 2
"""Every user key of (state, key) is gone."""
OP_META = 3
"""``value`` is non-keyed metadata (state schemas); key group and keys mean nothing."""

META_KEY_GROUP = 0xFFFF
"""What the key group column of metadata holds: no key group can be as high."""

MAX_CHANGE_BYTES = 64 << 20
"""Most bytes of key, user key and value of one change together: a decoder must be ready to hold as much."""

ENCODED_AHEAD_BYTES = 512 << 10
"""From so many bytes on a change set is encoded when its attempt ends, not when it is persisted. Sets of 120 KB had
better wait: encoded one by one, between the requests of tasks, they cost a job that has every core busy 7 to 10 %."""

_FIXED_BYTES = 5  # key group and state, two bytes each, and one of the operation
_MAX_KEY_GROUP = MAX_MAX_PARALLELISM - 1


class ChangeSet:
    """The changes of one log that will share a sequence number, in the order of their appends.

    Invariants:
        1. A change that was taken can be encoded: everything is checked on append, so that no bad change ever
           spoils a checkpoint later.
        2. Reading (:meth:`batches`) changes nothing that is observable.

    Not thread-safe. The writer stops appending to a set that it closes; then several threads may read it.

    Attributes:
        num_changes: The number of changes, metadata included.
    """

    __slots__ = ("_batches", "_payload", "num_changes")

    def __init__(self) -> None:
        self._batches: list[pa.RecordBatch] = []
        self.num_changes = 0
        self._payload = 0

    @property
    def nbytes(self) -> int:
        """Bytes of keys, user keys and values, and five for the other columns of each change; uncompressed."""
        return self._payload + _FIXED_BYTES * self.num_changes

    @property
    def is_empty(self) -> bool:
        """True until the first append."""
        return not self.num_changes

    def append_metadata(self, blob: bytes) -> None:
        """Append non-keyed metadata (state schemas); a reader sees it whatever key groups it asks for.

        Raises:
            Invalid: Not ``bytes``, or above :data:`MAX_CHANGE_BYTES`.
        """
        if not isinstance(blob, bytes):
            raise Invalid(f"metadata is not bytes: {type(blob).__name__}")
        self._append(*_metadata(blob))

    def append_batch(self, batch: pa.RecordBatch) -> None:
        """Append a batch of changes without copying it; it must not change afterwards.

        Any order of key groups is taken; a batch that is sorted by key group is encoded without a gather.

        Raises:
            Invalid: Other columns than :data:`CHANGE_SCHEMA`, nulls, numbers out of range, or a change above
                :data:`MAX_CHANGE_BYTES`. Nothing was appended.
        """
        if batch.num_rows == 0:
            return
        self._append(*_check(batch))

    def _append(self, checked: pa.RecordBatch, payload: int) -> None:
        self._batches.append(checked)
        self.num_changes += checked.num_rows
        self._payload += payload

    def batches(self) -> list[pa.RecordBatch]:
        """Return the changes as batches of :data:`CHANGE_SCHEMA`, in the order of their appends, not copied."""
        return list(self._batches)


def digest_changes(parts: Sequence[pa.RecordBatch]) -> bytes:
    """Return a digest of changes, 16 bytes: equal for equal ones, in whatever order and parts they come.

    Every partition makes the same changes to a broadcast state, in the order in which the shuffle has brought it the
    rows.

    Args:
        parts: Columns of :data:`CHANGE_SCHEMA`, without nulls.
    """
    whole = pa.Table.from_batches(parts, CHANGE_SCHEMA)
    ordered = whole.sort_by([(name, "ascending") for name in whole.column_names]).combine_chunks()
    made = hashlib.blake2b(digest_size=16)
    for batch in ordered.to_batches():
        made.update(batch.serialize())
    return made.digest()


@lru_cache(maxsize=64)
def _metadata(blob: bytes) -> tuple[pa.RecordBatch, int]:
    """Return metadata as a batch, checked; every attempt of an operator brings the same."""
    row = (META_KEY_GROUP, 0, OP_META, b"", b"", blob)
    columns = [pa.array([value], field.type) for value, field in zip(row, CHANGE_SCHEMA, strict=True)]
    return _check(pa.RecordBatch.from_arrays(columns, schema=CHANGE_SCHEMA))


def _check(batch: pa.RecordBatch) -> tuple[pa.RecordBatch, int]:
    """Return the batch as it will be stored, and how many payload bytes it holds."""
    is_ours, columns = batch.schema.equals(CHANGE_SCHEMA), batch.columns
    if not is_ours and (batch.schema.names != CHANGE_SCHEMA.names or batch.schema.types != CHANGE_SCHEMA.types):
        raise Invalid(f"not a batch of changes: columns {batch.schema.names} of {batch.schema.types}")
    if any(column.null_count for column in columns):
        raise Invalid("not a batch of changes: it holds nulls; use an empty value instead")
    try:
        batch.validate(full=True)
    except pa.ArrowInvalid as error:
        raise Invalid(f"not a batch of changes: {error}") from None
    key_groups, ops = np.asarray(columns[0]), np.asarray(columns[2])
    highest = int(ops.max())
    if highest > OP_META:
        raise Invalid(f"not a batch of changes: op {highest}")
    if highest == OP_META:
        key_groups = np.where(ops == OP_META, np.uint16(META_KEY_GROUP), key_groups)
        columns[0], is_ours = pa.array(key_groups, pa.uint16()), False
        key_groups = key_groups[ops != OP_META]
    if len(key_groups) and int(key_groups.max()) > _MAX_KEY_GROUP:
        raise Invalid(f"not a batch of changes: key group {int(key_groups.max())} is above {_MAX_KEY_GROUP}")
    offsets = [value_offsets(column) for column in columns[3:]]
    payload = sum(int(each[-1]) - int(each[0]) for each in offsets)
    if payload > MAX_CHANGE_BYTES:
        largest = int(np.sum([np.diff(each) for each in offsets], axis=0, dtype=np.int64).max())
        if largest > MAX_CHANGE_BYTES:
            raise Invalid(f"a change of {largest} bytes is above {MAX_CHANGE_BYTES}: split the value")
    return batch if is_ours else pa.RecordBatch.from_arrays(columns, schema=CHANGE_SCHEMA), payload
