"""The reads of one operator's state, over its table: each bounded, so that no reply holds more than was asked for.

They are asked for by the messages of ``dstl.rpc.messages``. A TaskManager answers those of its workers; a batch query
and a test have a table of their own in their process, and ask it through :func:`client_of`.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from operator import itemgetter
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dstl.changelog.change_set import OP_CLEAR, OP_DELETE, OP_PUT
from dstl.column_buffers import value_offsets
from dstl.errors import Invalid
from dstl.rpc.codec import Call, R
from dstl.rpc.messages import (
    ENTRY_COLUMNS,
    KEY_COLUMNS,
    VALUE_COLUMN,
    AttemptCall,
    DueEntries,
    Entries,
    ExpiryPlace,
    FetchDue,
    Fetched,
    FetchEntries,
    FetchEntry,
    FetchMany,
    FetchValues,
    ScanEntries,
    ScanValues,
    Values,
    read_columns,
    write_columns,
)
from dstl.rpc.state_client import StateClient
from dstl.taskmanager import timer_index
from dstl.taskmanager.expiry_index import ExpiryIndex
from dstl.taskmanager.timer_index import TimerIndex
from handles.key_group import MAX_MAX_PARALLELISM, KeyGroupRange
from materializer.tables import HeapStateTable, RocksDBStateTable, StateEntry, StateTable, TableSize

REPLY_BYTES = 64 << 20
"""About how many bytes of values one reply holds: a fourth of the longest frame."""

_TIME_BYTES = 8
"""What is due has a time of so many bytes: a page of a key group's has no more entries than fit into it of these."""

_JOINED_ROWS = 1 << 15
"""Changes of tasks are folded into a table together up to so many rows: of 64 tasks with 100 rows each, one by one,
those of a task took 127 us of processor time, and together 30; of 2,860 each, 245 and 135."""
_JOINED_BYTES = 4 << 20  # and up to so many bytes, which are copied

_PAGE = 512  # entries that are read beyond what a reply has room for, at most
_REPLY_FACTOR = 4  # keys that are just answerable in one reply

Pairs = list[tuple[bytes, bytes]]
"""User keys and values."""

Overlay = Iterable[tuple[pa.RecordBatch, bool]]
"""Changes of an attempt in their order, each with whether its times are new to an index by time."""


class TableSource:
    """One operator's table, its indexes by time, and the reads of both. Not thread-safe.

    Attributes:
        table: The operator's committed state.
    """

    def __init__(self, table: StateTable) -> None:
        self.table = table
        self._indexes: dict[tuple[int, ExpiryPlace | None], ExpiryIndex | TimerIndex] = {}

    def apply(self, changes: pa.RecordBatch, expiring: bool = True) -> None:
        """Apply changes, to the indexes too.

        Args:
            changes: Columns of ``CHANGE_SCHEMA``, sorted by key group.
            expiring: Their times may be new to an index by time.
        """
        self.table.apply(changes)
        for (_, place), index in self._indexes.items():
            if expiring or place is None:
                index.add(changes)

    def build(self, call: AttemptCall[Any]) -> Generator[None]:
        """Make the index that a read goes by, if it has one, in pieces of some milliseconds, and yield after each."""
        if isinstance(call, FetchDue):
            yield from self._index(call.state, call.place).build(call.key_groups)

    def answer(self, call: AttemptCall[R], max_bytes: int = REPLY_BYTES) -> R:
        """Return the reply to a read.

        Args:
            call: One of :data:`READS`.
            max_bytes: About how many bytes of values the reply holds where the caller asks again for the rest; at least
                one key's, or one entry.

        Raises:
            Invalid: The request cannot be answered.
        """
        reply: R = READS[type(call)](self, call, max_bytes)
        return reply

    def content(
        self, state: int, key_group: int, key: bytes, changes: Overlay = (), user_keys: Sequence[bytes] = ()
    ) -> dict[bytes, bytes]:
        """Return one key's values by user key, in no order, as they are behind some changes.

        Args:
            state: The state's number.
            key_group: The key's.
            key: The key.
            changes: What has become of it.
            user_keys: Of the values that are wanted; empty for all.

        Raises:
            Invalid: They are too much for one reply.
        """
        if user_keys:
            held = zip(user_keys, self.table.get_entry(state, key_group, key, user_keys), strict=True)
            found = {each: value for each, value in held if value is not None}
            for batch, _ in changes:
                _change(found, batch, state, key)
            return {each: found[each] for each in user_keys if each in found}
        (value,) = self.table.get_many(state, (key_group,), (key,))
        found = {} if value is None else {b"": value}
        size = 0
        for entry in self._entries_of(state, key_group, key):
            found[entry.user_key] = entry.value
            size += len(entry.user_key) + len(entry.value)
            if size > REPLY_BYTES:
                raise Invalid(f"the key has more than {REPLY_BYTES >> 20} MiB of state, the most that a lookup returns")
        for batch, _ in changes:
            _change(found, batch, state, key)
        return found

    def _entries_of(self, state: int, key_group: int, key: bytes, after: bytes = b"") -> Iterator[StateEntry]:
        """Yield a key's entries behind a user key, page by page."""
        # The smallest key above this one is this one with a zero byte behind it.
        while page := self.table.scan(state, key_group, after=(key, after), before_key=key + b"\0", limit=_PAGE):
            yield from page
            if len(page) < _PAGE:
                return
            after = page[-1].user_key

    def _index(self, state: int, place: ExpiryPlace | None) -> ExpiryIndex | TimerIndex:
        if (state, place) not in self._indexes:
            made = TimerIndex(self.table, state) if place is None else ExpiryIndex(self.table, state, place)
            self._indexes[state, place] = made
        return self._indexes[state, place]

    def _fetch_many(self, call: FetchMany, max_bytes: int) -> Values:
        found = [self.table.get_many(state, call.key_groups, call.keys) for state in call.states]
        count = count_within(found, max_bytes)
        return Values(_tuples(found if count == len(call.keys) else [column[:count] for column in found]))

    def _fetch_values(self, call: FetchValues, max_bytes: int) -> Fetched:
        key_groups, keys = read_columns(memoryview(call.keys), KEY_COLUMNS)
        found = self.table.get_values(call.state, np.asarray(key_groups), keys)
        offsets = value_offsets(found)
        if int(offsets[-1]) - int(offsets[0]) > max_bytes:
            fitting = int(np.searchsorted(offsets[1:], int(offsets[0]) + max_bytes, side="right"))
            found = found.slice(0, max(1, fitting))
        return Fetched(write_columns(VALUE_COLUMN, [found]))

    def _fetch_entries(self, call: FetchEntries, max_bytes: int) -> Entries:
        found = self.table.get_entries(call.state, call.key_groups, call.keys)
        return _entries(bounded_entries(found, call.max_bytes))

    def _fetch_entry(self, call: FetchEntry, max_bytes: int) -> Values:
        return Values(_tuples([self.table.get_entry(call.state, call.key_group, call.key, call.user_keys)]))

    def _scan_entries(self, call: ScanEntries, max_bytes: int) -> Entries:
        """Answer one key's next entries: about ``call.max_bytes``, at least one.

        No collection has an entry under the empty user key, which is a value state's.
        """
        page: Pairs = []
        size = 0
        for entry in self._entries_of(call.state, call.key_group, call.key, call.after or b""):
            if page and size + max(1, len(entry.value)) > call.max_bytes:
                break
            page.append((entry.user_key, entry.value))
            size += len(entry.user_key) + len(entry.value)
        return _entries([page])

    def _fetch_due(self, call: FetchDue, max_bytes: int) -> DueEntries:
        index, skip = self._index(call.state, call.place), call.skip
        if call.place is None:
            max_bytes = min(max_bytes, timer_index.REPLY_BYTES)
        parts: list[pa.RecordBatch] = []
        more = False
        for key_group in call.key_groups:
            most = max(0, max_bytes) // _TIME_BYTES + 2  # one at least, and one to see that there are more
            keys, values = index.due(key_group, call.until, skip, most, with_values=call.with_values)
            skip = 0
            if not len(keys):
                continue
            sizes = np.cumsum(np.diff(value_offsets(keys)) + np.diff(value_offsets(values)).astype(np.int64))
            count = max(0 if parts else 1, int(np.searchsorted(sizes, max_bytes, side="right")))
            count = min(count, len(keys))
            groups = pa.array(np.full(count, key_group, np.uint16))
            parts.append(pa.RecordBatch.from_arrays([groups, keys[:count], values[:count]], schema=ENTRY_COLUMNS))
            more = count < len(keys) or len(keys) == most
            if more:
                break
            max_bytes -= int(sizes[-1])
        return DueEntries(more, _stream(parts))

    def _scan_values(self, call: ScanValues, max_bytes: int) -> Fetched:
        """Answer the next values of a key group in the order of their keys: about ``max_bytes``, at least one."""
        keys: list[bytes] = []
        values: list[bytes] = []
        size = 0
        last = None if call.after is None else (call.after, b"")
        while size < max_bytes:
            found = self.table.scan(call.state, call.key_group, after=last, limit=_PAGE)
            keys += [entry.key for entry in found]
            values += [entry.value for entry in found]
            if len(found) < _PAGE:
                break
            size += sum(len(entry.key) + len(entry.value) for entry in found)
            last = found[-1].key, b""
        columns = [pa.array(np.full(len(keys), call.key_group, np.uint16)), pa.array(keys, pa.binary())]
        return Fetched(write_columns(ENTRY_COLUMNS, [*columns, pa.array(values, pa.binary())]))


READS: dict[type[AttemptCall[Any]], Callable[[TableSource, Any, int], Any]] = {
    FetchMany: TableSource._fetch_many,
    FetchValues: TableSource._fetch_values,
    FetchEntries: TableSource._fetch_entries,
    FetchEntry: TableSource._fetch_entry,
    ScanEntries: TableSource._scan_entries,
    FetchDue: TableSource._fetch_due,
    ScanValues: TableSource._scan_values,
}
"""All reads, and what answers them."""


@dataclass(frozen=True, slots=True)
class Answered:
    """The reply of a call within the process."""

    reply: Any
    is_done: bool = True

    def result(self) -> Any:
        """Return it."""
        return self.reply


@dataclass(frozen=True, slots=True)
class LocalTransport:
    """A table in this process, as a :class:`~dstl.rpc.state_client.StateClient` sees one elsewhere.

    Attributes:
        source: The table. It is read alone; what is written to it, :meth:`TableSource.apply` takes.
    """

    source: TableSource

    def send(self, message: Call[Any]) -> Answered:
        """Answer a read."""
        assert isinstance(message, AttemptCall)
        return Answered(self.source.answer(message))


def client_of(source: TableSource) -> StateClient:
    """Return what reads a table in this process: the source of a task's state without a TaskManager."""
    return StateClient([(KeyGroupRange.all(MAX_MAX_PARALLELISM), LocalTransport(source))], "", 0)


def nothing_held() -> StateClient:
    """Return what reads an empty table: the source of state where there is none yet."""
    return client_of(TableSource(HeapStateTable()))


def count_within(columns: Sequence[Sequence[bytes | None]], max_bytes: int) -> int:
    """Return of how many keys, from the first on, the values are sent: about ``max_bytes``, at least those of one key.

    Args:
        columns: For each state, one value per key.
        max_bytes: What a reply may hold; the rest is asked for again.
    """
    count = len(columns[0]) if columns else 0
    if sum(sum(map(len, filter(None, column))) for column in columns) <= max_bytes:
        return count
    sizes = np.zeros(count, np.int64)
    for column in columns:
        sizes += np.fromiter((len(value or b"") for value in column), np.int64, count)
    return max(1, int(np.searchsorted(np.cumsum(sizes), max_bytes, side="right")))


def bounded_entries(found: Sequence[Pairs], max_bytes: int) -> list[Pairs | None]:
    """Return the entries of each key, None where they are more than ``max_bytes``: those are read page by page.

    Keys at the end are None too once the reply has grown to four times ``max_bytes``; the first key that fits is
    always answered.
    """
    total = 0
    bounded: list[Pairs | None] = []
    for entries in found:
        size = sum(len(user_key) + len(value) for user_key, value in entries)
        fits = size <= max_bytes and total + size <= _REPLY_FACTOR * max_bytes
        bounded.append(entries if fits else None)
        total += size if fits else 0
    return bounded


def _change(found: dict[bytes, bytes], changes: pa.RecordBatch, state: int, key: bytes) -> None:
    """Make changes of one key to its values."""
    mine = pc.and_(
        pc.equal(changes.column("state"), pa.scalar(state, pa.uint16())),
        pc.equal(changes.column("key"), pa.scalar(key, pa.binary())),
    )
    for row in changes.filter(mine).to_pylist():
        if row["op"] == OP_PUT:
            found[row["user_key"]] = row["value"]
        elif row["op"] == OP_DELETE:
            found.pop(row["user_key"], None)
        elif row["op"] == OP_CLEAR:
            found.clear()


def _entries(found: Sequence[Pairs | None]) -> Entries:
    pairs = list(chain.from_iterable(entries or () for entries in found))
    counts = tuple(None if entries is None else len(entries) for entries in found)
    return Entries(counts, tuple(map(itemgetter(0), pairs)), tuple(map(itemgetter(1), pairs)))


def _tuples(columns: Sequence[Sequence[bytes | None]]) -> tuple[tuple[bytes | None, ...], ...]:
    return tuple(map(tuple, columns))


def _stream(parts: Sequence[pa.RecordBatch]) -> memoryview:
    whole = pa.Table.from_batches(parts, ENTRY_COLUMNS).combine_chunks()
    columns = [column.chunk(0) if column.num_chunks else pa.array([], column.type) for column in whole.columns]
    return write_columns(ENTRY_COLUMNS, columns)


class CommittedTables:
    """Tables by operator, and what is derived from them. One event loop; not thread-safe.

    Changes are noted when their checkpoint counts, and folded in at the next look at any table, or by :meth:`fold`
    before it: no look sees a table without them.

    Attributes:
        open_table: Makes an empty table for an operator; for restores, too.
    """

    def __init__(self, open_table: Callable[[str], StateTable]) -> None:
        self.open_table = open_table
        self._sources: dict[str, TableSource] = {}
        self._unfolded: deque[tuple[str, pa.RecordBatch, bool]] = deque()

    @property
    def has_failed(self) -> bool:
        """True where a table cannot be used any more: all must be restored."""
        return any(source.table.has_failed for source in self._sources.values())

    @property
    def waiting_rows(self) -> int:
        """Changes that have been added and not folded in yet."""
        return sum(part.num_rows for _, part, _ in self._unfolded)

    def all(self) -> Mapping[str, StateTable]:
        """Return the tables by operator."""
        self.fold()
        return {operator: source.table for operator, source in self._sources.items()}

    def source(self, operator: str) -> TableSource:
        """Return an operator's table and its reads, an empty one for a new operator."""
        self.fold()
        return self._opened(operator)

    def is_in_files(self, operator: str) -> bool:
        """True where an operator's table lies on a disk, so that its entries take no memory each."""
        return isinstance(self._opened(operator).table, RocksDBStateTable)

    def size(self, operator: str) -> TableSize:
        """Return how much an operator's table holds, without what waits to be folded in."""
        return self._opened(operator).table.size()

    def add(self, operator: str, overlay: Overlay) -> None:
        """Note an operator's changes, to be folded in behind those that wait already."""
        self._unfolded.extend((operator, *part) for part in overlay)

    def fold(self, most_rows: float = math.inf) -> bool:
        """Fold in what waits, now rather than at the next look. What fails stays, and all behind it.

        Args:
            most_rows: Ends behind the part with which so many are reached.

        Returns:
            Whether there is more.
        """
        while self._unfolded and most_rows > 0:
            operator, changes, expiring = self._unfolded[0]
            parts, rows, nbytes = [changes], changes.num_rows, changes.get_total_buffer_size()
            for of, part, of_part in islice(self._unfolded, 1, None):
                rows, nbytes = rows + part.num_rows, nbytes + part.get_total_buffer_size()
                if (of, of_part) != (operator, expiring) or rows > _JOINED_ROWS or nbytes > _JOINED_BYTES:
                    break
                parts.append(part)
            self._opened(operator).apply(pa.concat_batches(parts) if len(parts) > 1 else changes, expiring)
            for part in parts:
                self._unfolded.popleft()
                most_rows -= part.num_rows
        return bool(self._unfolded)

    def replace(self, tables: dict[str, StateTable]) -> None:
        """Take other tables, close those that were here, and forget what waited for them."""
        self._unfolded.clear()
        for source in self._sources.values():
            source.table.close()
        self._sources = {operator: TableSource(table) for operator, table in tables.items()}

    def _opened(self, operator: str) -> TableSource:
        if operator not in self._sources:
            self._sources[operator] = TableSource(self.open_table(operator))
        return self._sources[operator]
