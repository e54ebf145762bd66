"""Rows of a state as entries of our tables, encoded and packed by key group in Spark's own tasks."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from itertools import groupby

import numpy as np
import pyarrow as pa
from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import BinaryType, IntegerType, StructField, StructType

from dstl.checkpoint.savepoint.creation import SavepointFileWriter
from dstl.column_buffers import empty_values
from dstl.errors import Invalid
from dstl.state.codec.key_codec import KeyCodec
from dstl.state.codec.value_codec import HAS_WRITE_TIME, WRITE_TIME
from dstl.state.codec.value_columns import ValueColumns
from dstl.state.descriptor import StateDescriptor, StateKind
from dstl.state.list_state import MAX_NUMBER, element_user_key
from dstl.state.timers import expiry_user_key
from handles.checkpoint import OperatorEntry
from handles.key_group import KeyGroupRange
from materializer.bases.key_group_file import encode_key_group
from materializer.tables import HeapStateTable
from materializer.tables.base import ENTRY_SCHEMA
from materializer.tables.columns import key_group_runs

GROUP, KEY, USER_KEY, VALUE, ENDS = "key_group", "key", "user_key", "value", "ends"
ENTRIES = StructType(
    [
        *(StructField(name, IntegerType()) for name in (GROUP, "state")),
        *(StructField(name, BinaryType()) for name in (KEY, USER_KEY, VALUE)),
    ]
)
"""Columns of entries, in any order and partition."""

_FILES = "key_group int, entries long, data binary"
_SHOWN = {KEY: "key", USER_KEY: "user key, position or expiry", VALUE: "value"}


@dataclass(frozen=True, slots=True)
class StateFrame:
    """The rows of one state, in columns that are the same for all kinds.

    Attributes:
        rows: Key group, key (not of a broadcast state); user key of a map or broadcast state, position of a list's
            element, expiry of a timer; value; end of its life, where values have one.
        key: Type of the grouping key.
        user_key: Type of the user key of a map or broadcast state.
        value: Type of the value; of a timer no column.
    """

    rows: DataFrame
    key: StructType
    user_key: StructType | None
    value: StructType

    def entries(self, descriptor: StateDescriptor) -> DataFrame:
        """Return the rows as entries, columns of :data:`ENTRIES`.

        Args:
            descriptor: The state's number, kind and time to live.
        """
        return self.rows.mapInArrow(EntryEncoder(descriptor, self.key, self.user_key, self.value), ENTRIES)


def pack(parts: Sequence[DataFrame], names: Mapping[int, str], max_parallelism: int) -> DataFrame:
    """Return the key groups of an operator that have entries, each as a base file, in ascending order.

    Rows are ``(key_group, entries, data)``. Memory: in a task one key group, in the driver one partition's files.

    Args:
        parts: The operator's entries, columns of :data:`ENTRIES`.
        names: Those of its states by their numbers, for messages.
        max_parallelism: Key groups.
    """
    entries = parts[0]
    for part in parts[1:]:
        entries = entries.union(part)
    partitions = min(max_parallelism, int(entries.sparkSession.conf.get("spark.sql.shuffle.partitions") or 1))
    place = F.floor(F.col(GROUP) * F.lit(partitions) / F.lit(max_parallelism)).cast("int")
    placed = entries.repartitionById(partitions, place).sortWithinPartitions(GROUP)
    return placed.mapInArrow(partial(pack_key_groups, dict(names)), _FILES)


@dataclass(frozen=True, slots=True)
class PackedOperator:
    """An operator of a savepoint that is being made.

    Attributes:
        entry: What the savepoint says of it.
        packed: Its key groups that have entries, as :func:`pack` returns them: Spark makes them when they are asked
            for.
    """

    entry: OperatorEntry
    packed: DataFrame

    async def add_to(self, files: SavepointFileWriter, max_parallelism: int) -> None:
        """Let Spark make the key groups and add them to a savepoint, empty ones included."""
        # The iterator waits for Spark's jobs, the loop meanwhile for uploads.
        rows = self.packed.toLocalIterator()
        expected = 0
        while (row := await asyncio.to_thread(next, rows, None)) is not None:
            await _add_empty(files, self.entry.uid, range(expected, row["key_group"]))
            await files.add(self.entry.uid, row["key_group"], bytes(row["data"]), row["entries"])
            expected = row["key_group"] + 1
        await _add_empty(files, self.entry.uid, range(expected, max_parallelism))


async def _add_empty(files: SavepointFileWriter, uid: str, groups: range) -> None:
    """Write key groups without entries: what is missing from a savepoint is damage."""
    if groups:
        await files.write(uid, HeapStateTable(), KeyGroupRange(groups.start, groups.stop - 1), {})


class EntryEncoder:
    """Encodes the rows of one state. Pickled into tasks.

    Args:
        descriptor: The state's number, kind and time to live here.
        key: Types of the rows, as :class:`StateFrame` has them.
        user_key: The same.
        value: The same.
    """

    def __init__(
        self, descriptor: StateDescriptor, key: StructType, user_key: StructType | None, value: StructType
    ) -> None:
        self._descriptor = descriptor
        self._key, self._user_key, self._value = key, user_key, value

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yield each row as an entry with its key group.

        Raises:
            Invalid: A null, or a position, that no entry can have; names the state.
        """
        keys = KeyCodec(self._key)
        user_keys = KeyCodec(self._user_key, "the user key") if self._user_key is not None else None
        ttl_ms = self._descriptor.ttl_ms
        values = ValueColumns(self._descriptor.name, [self._value], write_time_ms=0 if ttl_ms else None)
        for batch in batches:
            count = batch.num_rows
            if not count:
                continue
            for column in (KEY, USER_KEY, VALUE):
                if column in batch.schema.names and batch.column(column).null_count:
                    raise Invalid(f"state {self._descriptor.name!r}: a row has null as its {_SHOWN[column]}")
            is_shared = self._descriptor.kind is StateKind.BROADCAST
            entries = {
                GROUP: batch.column(GROUP),
                "state": pa.array([self._descriptor.state_id] * count, pa.int32()),
                KEY: empty_values(count) if is_shared else keys.encode_array(_fields(batch.column(KEY)), count),
                USER_KEY: self._user_keys(batch, user_keys),
                VALUE: self._values(batch, values),
            }
            yield pa.RecordBatch.from_pydict(entries)

    def _user_keys(self, batch: pa.RecordBatch, codec: KeyCodec | None) -> pa.Array:
        if codec is not None:
            return codec.encode_array(_fields(batch.column(USER_KEY)), batch.num_rows)
        match self._descriptor.kind:
            case StateKind.LIST:
                found = [self._element(position) for position in batch.column(USER_KEY).to_pylist()]
            case StateKind.TIMER:
                found = list(map(expiry_user_key, batch.column(USER_KEY).to_pylist()))
            case _:
                return empty_values(batch.num_rows)
        return pa.array(found, pa.binary())

    def _element(self, position: int) -> bytes:
        if not 0 <= position <= MAX_NUMBER:
            raise Invalid(f"state {self._descriptor.name!r}: position {position} is not one from 0 to {MAX_NUMBER}")
        return element_user_key(0, position)

    def _values(self, batch: pa.RecordBatch, codec: ValueColumns) -> pa.Array:
        if self._descriptor.kind is StateKind.TIMER:
            return empty_values(batch.num_rows)
        content = pa.RecordBatch.from_arrays(_fields(batch.column(VALUE)), names=self._value.names)
        found = codec.encode(content)
        if not self._descriptor.ttl_ms:
            return found
        ends = batch.column(ENDS).to_pylist()
        return pa.array(map(self._with_write_time, found.to_pylist(), ends), pa.binary())

    def _with_write_time(self, value: bytes, ends_ms: int | None) -> bytes:
        """Return an encoded value with its write time: Spark keeps when a value ends, if it does, we when it began."""
        content = value[1 + WRITE_TIME.size :]
        if ends_ms is None:
            return bytes([value[0] & ~HAS_WRITE_TIME]) + content
        return value[:1] + WRITE_TIME.pack(ends_ms - self._descriptor.ttl_ms) + content


def _fields(column: pa.StructArray) -> list[pa.Array]:
    return list(column.flatten())


def pack_key_groups(names: Mapping[int, str], batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Pack a task's entries, which come in the order of key groups, into the base file of each.

    Args:
        names: Those of the states by their numbers, for messages.
        batches: The entries.

    Raises:
        Invalid: Two entries have the same place: one of them would be lost.
    """
    columns = ENTRY_SCHEMA.names
    for group, runs in groupby(_runs(batches), key=lambda run: run[0]):
        table, given = HeapStateTable(), Counter[int]()
        table.restore(group, (_counted(page.select(columns).cast(ENTRY_SCHEMA), given) for _, page in runs))
        with closing(table), closing(table.snapshot()) as snapshot:
            file = encode_key_group(snapshot, group)
            if file.rows != given.total():
                held = Counter[int]()
                for page in snapshot.entries(group):
                    _counted(page, held)
                states = " and ".join(f"state {names.get(number, number)!r}" for number in sorted(given - held))
                raise Invalid(
                    f"{states}: two rows have the same key, and the same user key, position or expiry where the state "
                    "has one: one of them would be lost. 0.0 and -0.0 are one key, and so is every NaN"
                )
        yield pa.RecordBatch.from_pydict(
            {
                GROUP: pa.array([group], pa.int32()),
                "entries": pa.array([file.rows], pa.int64()),
                "data": pa.array([file.data], pa.binary()),
            }
        )


def _counted(page: pa.RecordBatch, found: Counter[int]) -> pa.RecordBatch:
    """Return a page, whose entries are counted by state."""
    states, counts = np.unique(page.column("state").to_numpy(), return_counts=True)
    found.update(dict(zip(states.tolist(), counts.tolist(), strict=True)))
    return page


def _runs(batches: Iterable[pa.RecordBatch]) -> Iterator[tuple[int, pa.RecordBatch]]:
    for batch in batches:
        for group, start, stop in key_group_runs(batch.column(GROUP).to_numpy()):
            yield group, batch.slice(start, stop - start)
