"""Broadcast state: a map that every partition of an operator reads, and that its broadcast streams write.

Each partition applies the same rows to the same prior content, so each comes to the same map without asking another.
A worker process reads the content once for each checkpoint, whatever the number of its tasks.
One of them hands its writes to the log; all tell the digest of theirs, and the coordinator compares them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.types import StructType

from dstl.errors import Invalid
from dstl.rpc.state_client import Entry, StateClient
from dstl.state.codec.key_codec import KeyCodec
from dstl.state.descriptor import DeclaredState
from dstl.state.entry_state import StateAccess
from dstl.state.key_window import KeyWindow
from dstl.state.keyed_batch import FrameLimits, Style, slices_of
from dstl.state.map_state import MapState
from dstl.state.overlay import Overlay
from dstl.state.processor_errors import StateCallError

ReadWhole = Callable[[int, Callable[[], list[Entry] | None]], list[Entry] | None]
"""Returns all entries of a broadcast state by its number; calls the function where they are not at hand."""

BROADCAST_KEY_GROUP = 0
"""The key group that a job's only copy lies in, whatever its parallelism; its partition is always the first."""

_KEY = b""
"""Stands where a grouping key would: no key of a row is empty."""


class BroadcastCopies:
    """Holds the content of each broadcast state of one job at the last checkpoint that a task has read it of.

    A state takes no more than what a task reads whole (``BroadcastState.whole_bytes``). Not thread-safe.
    """

    def __init__(self) -> None:
        self._job: Hashable = None
        self._held: dict[tuple[str, int], tuple[int | None, list[Entry]]] = {}

    def whole(
        self,
        job: Hashable,
        operator: str,
        checkpoint: int | None,
        state: int,
        fetch: Callable[[], list[Entry] | None],
    ) -> list[Entry] | None:
        """Return all entries of a state, from here or by ``fetch``. The list is shared and must not be changed.

        Args:
            job: Tells the job, and its coordinator, from others, whose checkpoints have the same numbers.
            operator: The operator.
            checkpoint: The checkpoint whose content is wanted; None for that of a new job.
            state: The state's number.
            fetch: Reads them; None from it, for a state that is too large, is returned and not kept.
        """
        if job != self._job:
            self._job = job
            self._held.clear()
        held = self._held.get((operator, state))
        if held is not None and held[0] == checkpoint:
            return held[1]
        found = fetch()
        if found is None:
            self._held.pop((operator, state), None)
        else:
            self._held[operator, state] = checkpoint, found
        return found


class BroadcastScope:
    """The writes of one task to all its broadcast states, and when they may be made.

    Attributes:
        window: The one place that broadcast states have; no state can be used before :meth:`open`.
        overlay: What this task has written.
        stream: The broadcast stream whose rows are being handled; None while there is none, and nothing may be written.
    """

    def __init__(self) -> None:
        self.window = KeyWindow()
        self.window.forward = False
        self.overlay = Overlay()
        self.stream: str | None = None

    def open(self) -> None:
        """Let the states be used."""
        self.window.keys, self.window.key_groups, self.window.index = [_KEY], [BROADCAST_KEY_GROUP], 0

    def close(self) -> Iterator[pa.RecordBatch]:
        """Let the states be used no more, and return the writes as batches of ``CHANGE_SCHEMA``."""
        self.window.keys, self.window.key_groups, self.window.index = (), (), -1
        return iter(self.overlay.drain())


class BroadcastState(MapState):
    """A map of tuples to tuples, the same for all grouping keys; ``handle.getBroadcastState`` returns it.

    It has the methods of PySpark's ``MapState``. Those that write can be called in ``handleBroadcastRows`` alone.
    """

    whole_bytes: ClassVar[int] = 8 << 20
    """It is read whole up to this size, once a batch by each process that looks at it; a larger one entry by entry."""

    def __init__(
        self,
        declared: DeclaredState,
        source: StateClient,
        scope: BroadcastScope,
        user_keys: KeyCodec,
        read: ReadWhole | None = None,
    ) -> None:
        super().__init__(declared, StateAccess(scope.window, source, scope.overlay), user_keys)
        self._scope = scope
        self._read = read

    def updateValue(self, key: tuple[Any, ...], value: tuple[Any, ...]) -> None:
        """Set the value of a user key.

        Raises:
            StateCallError: Called elsewhere than in ``handleBroadcastRows``, or not with tuples of the state's schemas.
        """
        self._check_writable("updating broadcast state value")
        super().updateValue(key, value)

    def removeKey(self, key: tuple[Any, ...]) -> None:
        """Remove a user key; nothing happens where it is not there. Errors as above."""
        self._check_writable("removing key from broadcast state")
        super().removeKey(key)

    def clear(self) -> None:
        """Remove all entries. Errors as above."""
        self._check_writable("clearing broadcast state")
        super().clear()

    def _fetch(self, index: int) -> list[Entry] | None:
        if self._read is None:
            return super()._fetch(index)
        return self._read(self.descriptor.state_id, partial(super()._fetch, index))

    def _check_writable(self, doing: str) -> None:
        if self._scope.stream is None:
            name = self.descriptor.name
            raise StateCallError(
                doing,
                Invalid(
                    f"broadcast state {name!r} is written in handleBroadcastRows only, where every partition makes the "
                    "same change: keep what belongs to one key in a state of its own (getValueState, getMapState)"
                ),
            )


_ROWS = 1 << 14  # Python rows that exist at once


@dataclass(frozen=True, slots=True)
class BroadcastStream:
    """A stream that every partition of an operator gets whole.

    Attributes:
        name: As the user has named it.
        column: The input's helper column that carries its rows: a list of one struct, null in all other rows.
        schema: Its columns.
    """

    name: str
    column: str
    schema: StructType


@dataclass(frozen=True, slots=True)
class BroadcastRows:
    """The rows of one stream in one batch.

    Attributes:
        stream: Whose they are.
        rows: All of them, in their order.
    """

    stream: BroadcastStream
    rows: pa.Table

    def take(self, style: Style, limits: FrameLimits) -> Iterator[Any]:
        """Iterate over them as a processor of this style takes them: ``Row`` by ``Row``, or in data frames."""
        for batch in self.rows.combine_chunks().to_batches(max_chunksize=None if style == "pandas" else _ROWS):
            count = batch.num_rows
            yield from slices_of(self.stream.schema, batch.columns, count, style, limits)(0, count)


def rows_of_streams(marked: Sequence[pa.RecordBatch], streams: Sequence[BroadcastStream]) -> list[BroadcastRows]:
    """Return the rows of those streams that have any, in the order of the streams.

    A shuffle delivers the rows of several tasks in any order, and of each partition in another. So they are sorted by
    their columns, from the first to the last: equal rows cannot be told from each other.

    Args:
        marked: Rows that were sent to this partition by number, not by key.
        streams: The operator's.
    """
    found = []
    for stream in streams:
        parts = [batch.column(stream.column) for batch in marked]
        structs = pa.chunked_array([pc.list_flatten(part) for part in parts]) if parts else None
        if structs is not None and len(structs):
            columns = structs.combine_chunks().flatten()
            table = pa.Table.from_arrays(columns, names=[str(at) for at in range(len(columns))])
            found.append(BroadcastRows(stream, _sort(table).rename_columns(stream.schema.names)))
    return found


def _sort(table: pa.Table) -> pa.Table:
    """Return the rows by the values of their columns; what Arrow cannot compare goes by its text."""
    keys = {str(at): column if _sortable(column.type) else _texts(column) for at, column in enumerate(table.columns)}
    # Zeros of either sign are equal to each other, and so are all NaNs, but they are other values.
    floats = [_texts(column) for column in table.columns if pa.types.is_floating(column.type)]
    keys.update((f"text {at}", texts) for at, texts in enumerate(floats))
    order = pc.sort_indices(pa.table(keys), [(name, "ascending") for name in keys])
    return table.take(order)


def _sortable(kind: pa.DataType) -> bool:
    types = pa.types
    return bool(
        types.is_integer(kind)
        or types.is_floating(kind)
        or types.is_boolean(kind)
        or (types.is_temporal(kind) and not types.is_interval(kind))
        or types.is_string(kind)
        or types.is_binary(kind)
        or types.is_decimal(kind)
    )


def _texts(column: pa.ChunkedArray) -> pa.Array:
    return pa.array([repr(value) for value in column.to_pylist()], pa.string())
