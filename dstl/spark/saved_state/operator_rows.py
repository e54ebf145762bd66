"""The states of one operator of a savepoint, read in Spark's own tasks: as rows of a DataFrame, or as entries."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import count
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.types import IntegerType, StructField, StructType

from dstl.checkpoint.savepoint.creation import TARGET_FILE_BYTES, key_group_chunks
from dstl.options import S3Options, SealingOptions
from dstl.runtime import IoLoop, system_runtime
from dstl.spark.saved_state.entries import ENTRIES, GROUP, KEY, USER_KEY, VALUE
from dstl.spark.saved_state.frame import EXPIRY, POSITION, shown_schema
from dstl.state.codec.key_codec import KeyCodec
from dstl.state.codec.value_codec import write_time_ms
from dstl.state.codec.value_columns import ValueColumns
from dstl.state.descriptor import StateDescriptor, StateKind
from dstl.state.frames.row_writer import arrow_schema
from dstl.state.registry import StateRegistry
from dstl.state.timers import expiry_ms
from dstl.store import open_store
from dstl.store.base import ObjectStore
from handles.checkpoint import CompletedCheckpoint
from handles.key_group import KeyGroupRange
from materializer.bases.table_directory import FileBases
from materializer.restore.restore import heap_tables
from materializer.tables import StateTable

PLACED = "placed"
"""The key of an entry, decoded, by which it is placed; null in those of broadcast states."""


@dataclass(frozen=True)
class SavedOperator:
    """One operator of a savepoint. Pickled into tasks, each of which restores some of its key groups.

    Attributes:
        location: Of the savepoint.
        checkpoint: The savepoint as a checkpoint of this operator alone.
        s3: For a savepoint in S3.
        sealing: For a location whose objects are sealed.
    """

    location: str
    checkpoint: CompletedCheckpoint
    s3: S3Options
    sealing: SealingOptions | None

    @property
    def chunks(self) -> list[KeyGroupRange]:
        """The key groups of each task."""
        return key_group_chunks(self.checkpoint, TARGET_FILE_BYTES)

    def pages(self, batches: Iterable[pa.RecordBatch]) -> Iterator[tuple[int, pa.RecordBatch]]:
        """Yield key groups and pages of their entries, those of a key group one behind the other.

        Args:
            batches: Numbers of :attr:`chunks`, in their only column.
        """
        chunks, store, loop = self.chunks, open_store(self.location, self.s3, self.sealing), IoLoop("dstl-savepoint")
        with loop.closing(store):
            for number in (each for batch in batches for each in batch.column(0).to_pylist()):
                for table in loop.run(self._restored(store, chunks[number])):
                    with closing(table), closing(table.snapshot()) as snapshot:
                        for group in chunks[number]:
                            for page in snapshot.entries(group):
                                yield group, page

    async def _restored(self, store: ObjectStore, key_groups: KeyGroupRange) -> list[StateTable]:
        async with (
            FileBases(store, system_runtime()) as files,
            heap_tables(self.checkpoint, files, key_groups) as tables,
        ):
            return [tables.pop(operator) for operator in list(tables)]


class StateDecoder:
    """Decodes the rows of one state. Pickled into tasks.

    Args:
        saved: The operator.
        descriptor: The state.
        key: The operator's key.
        schema: The rows' columns, without the key group.

    Attributes:
        schema: The rows' columns, the key group first.
    """

    def __init__(self, saved: SavedOperator, descriptor: StateDescriptor, key: StructType, schema: StructType) -> None:
        self._saved, self._descriptor, self._key = saved, descriptor, key
        self.schema = StructType([StructField(GROUP, IntegerType(), nullable=False), *schema.fields])

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yield the rows with their key groups."""
        arrow, number = arrow_schema(self.schema), pa.scalar(self._descriptor.state_id, pa.uint16())
        columns = self._columns()
        for group, whole in self._saved.pages(batches):
            page = whole.filter(pc.equal(whole.column("state"), number))
            if page.num_rows:
                found = [_as(columns[field.name](group, page), field.type) for field in arrow]
                yield pa.RecordBatch.from_arrays(found, schema=arrow)

    def _columns(self) -> dict[str, Callable[[int, pa.RecordBatch], Any]]:
        """Return, by column, what makes it of a key group's page: Arrow columns of a struct, or values."""
        descriptor = self._descriptor
        keys, user_keys = KeyCodec(self._key), KeyCodec(descriptor.user_key or StructType(), "the user key")
        values = ValueColumns(descriptor.name, descriptor.value_schemas)
        last: tuple[int, bytes] | None = None
        places = count()

        def positions(group: int, page: pa.RecordBatch) -> list[int]:
            nonlocal last, places
            found = []
            for key in page.column(KEY).to_pylist():
                if (group, key) != last:
                    last, places = (group, key), count()
                found.append(next(places))
            return found

        def ends(_: int, page: pa.RecordBatch) -> list[int | None]:
            if descriptor.kind is StateKind.TIMER:
                return list(map(expiry_ms, page.column(USER_KEY).to_pylist()))
            written = map(write_time_ms, page.column(VALUE).to_pylist())
            return [None if each is None else each + descriptor.ttl_ms for each in written]

        return {
            GROUP: lambda group, page: [group] * page.num_rows,
            KEY: lambda _, page: tuple(keys.decode_array(page.column(KEY))),
            USER_KEY: lambda _, page: tuple(user_keys.decode_array(page.column(USER_KEY))),
            POSITION: positions,
            VALUE: lambda _, page: tuple(values.decode(page.column(VALUE)).columns),
            EXPIRY: ends,
        }


class EntryReader:
    """Reads the entries of all states but some. Pickled into tasks.

    Args:
        saved: The operator.
        registry: Its states.
        left_out: Numbers of the states that are left out.
        with_keys: With :data:`PLACED`.

    Attributes:
        schema: The entries' columns.
    """

    def __init__(
        self, saved: SavedOperator, registry: StateRegistry, left_out: Collection[int], *, with_keys: bool
    ) -> None:
        self._saved, self._key, self._with_keys = saved, registry.key_schema, with_keys
        self._left_out = sorted(left_out)
        self._shared = [each.state_id for each in registry.descriptors if each.kind is StateKind.BROADCAST]
        placed = [StructField(PLACED, shown_schema(self._key))] if with_keys else []
        self.schema = StructType([*ENTRIES.fields, *placed])

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yield the entries."""
        arrow, keys = arrow_schema(self.schema), KeyCodec(self._key)
        for group, whole in self._saved.pages(batches):
            page = whole.filter(pc.invert(_is_one_of(whole, self._left_out)))
            is_shared = _is_one_of(page, self._shared)
            for part, shared in ((page.filter(pc.invert(is_shared)), False), (page.filter(is_shared), True)):
                if not part.num_rows:
                    continue
                columns: list[Any] = [[group] * part.num_rows, *part.columns]
                if self._with_keys:
                    columns.append([None] * part.num_rows if shared else tuple(keys.decode_array(part.column(KEY))))
                found = [_as(column, field.type) for column, field in zip(columns, arrow, strict=True)]
                yield pa.RecordBatch.from_arrays(found, schema=arrow)


def _is_one_of(page: pa.RecordBatch, states: Sequence[int]) -> pa.Array:
    return pc.is_in(page.column("state"), value_set=pa.array(states, pa.uint16()))


def _as(column: Any, kind: pa.DataType) -> pa.Array:
    """Return a column of this type, of one of another type, of columns of a struct, or of values."""
    if isinstance(column, tuple):
        parts = [_as(part, kind.field(at).type) for at, part in enumerate(column)]
        return pa.StructArray.from_arrays(parts, fields=list(kind))
    return column.cast(kind) if isinstance(column, pa.Array) else pa.array(column, kind)
