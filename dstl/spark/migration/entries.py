"""Rows of Spark's state reader as entries of our tables, encoded and packed by key group in Spark's own tasks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import pyarrow as pa
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import StructType

from dstl.spark.migration.spark_operator import SparkState
from dstl.spark.query.placement import key_group_of
from dstl.state.codec.key_codec import KeyCodec
from dstl.state.codec.stored_schema import schema_from_json
from dstl.state.codec.value_codec import HAS_WRITE_TIME, WRITE_TIME
from dstl.state.codec.value_columns import ValueColumns
from dstl.state.descriptor import StateDescriptor, StateKind
from dstl.state.list_state import element_user_key
from dstl.state.timers import expiry_user_key
from materializer.bases.key_group_file import encode_key_group
from materializer.tables import HeapStateTable
from materializer.tables.base import ENTRY_SCHEMA

_ENTRIES = "key_group int, state int, key binary, user_key binary, value binary"
_FILES = "key_group int, entries long, data binary"
_GROUP, _KEY, _USER_KEY, _VALUE, _ENDS = "key_group", "key", "user_key", "value", "ends"
_STATE_OPTIONS = {
    StateKind.VALUE: {},
    # An array has the elements in their order; a flattened list would have to be trusted to keep it.
    StateKind.LIST: {"flattenCollectionTypes": "false"},
    StateKind.MAP: {"flattenCollectionTypes": "true"},
}


@dataclass(frozen=True, slots=True)
class StateFrame:
    """The rows of one state, in columns that are the same for all kinds.

    Attributes:
        rows: Key group, key; user key of a map, position of a list's element, expiry of a timer; value; end of its
            life.
        key: Type of the grouping key.
        user_key: Type of a map's user key.
        value: Type of the value; of a timer no column.
    """

    rows: DataFrame
    key: StructType
    user_key: StructType | None
    value: StructType


@dataclass(frozen=True, slots=True)
class OperatorReader:
    """Reads the state of one operator as it is after a batch, by Spark's own reader.

    Attributes:
        spark: The session.
        location: The query's checkpoint.
        batch_id: The committed batch.
        number: Spark's operator id.
        max_parallelism: Key groups here.
    """

    spark: SparkSession
    location: str
    batch_id: int
    number: int
    max_parallelism: int

    def __str__(self) -> str:
        return f"operator {self.number} of {self.location}"

    def read(self, what: str, **options: str) -> tuple[DataFrame, StructType]:
        """Return rows of the reader, and their schema, looked at before Spark's parser here sees it.

        Args:
            what: Names the rows, for messages.
            options: The reader's, beside batch and operator.

        Raises:
            CorruptData: The schema holds another type than SQL's own: a user-defined one names a module, to be
                imported.
        """
        reader = self.spark.read.format("statestore").option("batchId", self.batch_id)
        df = reader.option("operatorId", self.number).options(**options).load(self.location)
        return df, schema_from_json(str(df._jdf.schema().json()), f"the schema of {what}")

    def state(self, state: SparkState) -> StateFrame:
        """Return one state."""
        options = {"stateVarName": state.name, **_STATE_OPTIONS[state.kind]}
        df, schema = self.read(f"state {state.name!r} of {self}", **options)
        key, user_key = schema["key"].dataType, None
        columns = self._placed(key)
        if state.kind is StateKind.LIST:
            elements = F.posexplode("list_value").alias(_USER_KEY, _VALUE)
            df = df.select(*columns, elements)
            columns = [F.col(_GROUP), F.col(_KEY), F.col(_USER_KEY)]
            value = F.col(_VALUE)
        elif state.kind is StateKind.MAP:
            user_key = schema["user_map_key"].dataType
            columns.append(F.col("user_map_key").alias(_USER_KEY))
            value = F.col("user_map_value")
        else:
            value = F.col("value")
        if state.has_ttl:
            columns += [value.getField("value").alias(_VALUE), value.getField("ttlExpirationMs").alias(_ENDS)]
        else:
            columns.append(value.alias(_VALUE))
        rows = df.select(*columns)
        return StateFrame(rows, key, user_key, rows.schema[_VALUE].dataType)

    def timers(self) -> StateFrame:
        """Return the timers."""
        df, schema = self.read(f"the timers of {self}", readRegisteredTimers="true")
        key = schema["key"].dataType
        rows = df.select(*self._placed(key), F.col("expiration_timestamp_ms").alias(_USER_KEY))
        return StateFrame(rows, key, None, StructType([]))

    def _placed(self, key: StructType) -> list[Column]:
        group = key_group_of([F.col("key").getField(name) for name in key.names], self.max_parallelism)
        return [group.alias(_GROUP), F.col("key").alias(_KEY)]


def pack(frames: Sequence[tuple[StateDescriptor, StateFrame]], max_parallelism: int) -> DataFrame:
    """Return the key groups of an operator that have entries, each as a base file, in ascending order.

    Rows are ``(key_group, entries, data)``. Memory: in a task one key group, in the driver one partition's files.

    Args:
        frames: The operator's states, and each one's number and schemas here.
        max_parallelism: Key groups.
    """
    parts = [
        frame.rows.mapInArrow(EntryEncoder(descriptor, frame.key, frame.user_key, frame.value), _ENTRIES)
        for descriptor, frame in frames
    ]
    entries = parts[0]
    for part in parts[1:]:
        entries = entries.union(part)
    partitions = min(max_parallelism, int(entries.sparkSession.conf.get("spark.sql.shuffle.partitions") or 1))
    place = F.floor(F.col(_GROUP) * F.lit(partitions) / F.lit(max_parallelism)).cast("int")
    return entries.repartitionById(partitions, place).sortWithinPartitions(_GROUP).mapInArrow(pack_key_groups, _FILES)


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
        """Yield each row as an entry with its key group."""
        keys = KeyCodec(self._key)
        user_keys = KeyCodec(self._user_key, "the user key") if self._user_key is not None else None
        ttl_ms = self._descriptor.ttl_ms
        values = ValueColumns(self._descriptor.name, [self._value], write_time_ms=0 if ttl_ms else None)
        for batch in batches:
            count = batch.num_rows
            if not count:
                continue
            entries = {
                _GROUP: batch.column(_GROUP),
                "state": pa.array([self._descriptor.state_id] * count, pa.int32()),
                _KEY: keys.encode_array(_fields(batch.column(_KEY)), count),
                _USER_KEY: self._user_keys(batch, user_keys),
                _VALUE: self._values(batch, values),
            }
            yield pa.RecordBatch.from_pydict(entries)

    def _user_keys(self, batch: pa.RecordBatch, codec: KeyCodec | None) -> pa.Array:
        match self._descriptor.kind:
            case StateKind.LIST:
                found = [element_user_key(0, position) for position in batch.column(_USER_KEY).to_pylist()]
            case StateKind.TIMER:
                found = list(map(expiry_user_key, batch.column(_USER_KEY).to_pylist()))
            case StateKind.MAP:
                assert codec is not None
                return codec.encode_array(_fields(batch.column(_USER_KEY)), batch.num_rows)
            case _:
                found = [b""] * batch.num_rows
        return pa.array(found, pa.binary())

    def _values(self, batch: pa.RecordBatch, codec: ValueColumns) -> pa.Array:
        if self._descriptor.kind is StateKind.TIMER:
            return pa.array([b""] * batch.num_rows, pa.binary())
        content = pa.RecordBatch.from_arrays(_fields(batch.column(_VALUE)), names=self._value.names)
        found = codec.encode(content)
        if not self._descriptor.ttl_ms:
            return found
        ends = batch.column(_ENDS).to_pylist()
        return pa.array(map(self._with_write_time, found.to_pylist(), ends), pa.binary())

    def _with_write_time(self, value: bytes, ends_ms: int | None) -> bytes:
        """Return an encoded value with its write time: Spark keeps when a value ends, if it does, we when it began."""
        content = value[1 + WRITE_TIME.size :]
        if ends_ms is None:
            return bytes([value[0] & ~HAS_WRITE_TIME]) + content
        return value[:1] + WRITE_TIME.pack(ends_ms - self._descriptor.ttl_ms) + content


def _fields(column: pa.StructArray) -> list[pa.Array]:
    return list(column.flatten())


def pack_key_groups(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Yield each key group of a task's entries, which come in the order of key groups, as a base file."""
    names = ENTRY_SCHEMA.names
    for group, pages in groupby(_runs(batches), key=lambda run: run[0]):
        table = HeapStateTable()
        table.restore(group, (page.select(names).cast(ENTRY_SCHEMA) for _, page in pages))
        snapshot = table.snapshot()
        try:
            file = encode_key_group(snapshot, group)
        finally:
            snapshot.close()
            table.close()
        yield pa.RecordBatch.from_pydict(
            {
                _GROUP: pa.array([group], pa.int32()),
                "entries": pa.array([file.rows], pa.int64()),
                "data": pa.array([file.data], pa.binary()),
            }
        )


def _runs(batches: Iterable[pa.RecordBatch]) -> Iterator[tuple[int, pa.RecordBatch]]:
    for batch in batches:
        groups = batch.column(_GROUP).to_pylist()
        start = 0
        for group, run in groupby(groups):
            length = sum(1 for _ in run)
            yield group, batch.slice(start, length)
            start += length
