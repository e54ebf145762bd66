"""Reads of collections out of a table, bounded so that one reply never holds more than was asked for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from dstl.changelog.value_offsets import value_offsets
from dstl.rpc.frame_columns import ENTRY_COLUMNS, KEY_COLUMNS, VALUE_COLUMN, read_columns, write_columns
from dstl.taskmanager.expiry_index import ExpiryIndex
from materializer.tables import StateTable

__all__ = [
    "REPLY_BYTES",
    "Due",
    "bounded_entries",
    "count_within",
    "due_entries",
    "entries_after",
    "next_values",
    "values_of",
]

REPLY_BYTES = 64 << 20
"""About how many bytes of values one reply holds: a fourth of the longest frame."""

_PAGE = 512
_REPLY_FACTOR = 4


def values_of(table: StateTable, state: int, wanted: memoryview, max_bytes: int = REPLY_BYTES) -> memoryview:
    """Return the values of many keys of a point state.

    Args:
        table: Where to look.
        state: The state's number.
        wanted: An Arrow stream of one batch of ``KEY_COLUMNS``.
        max_bytes: See :func:`fitting`.

    Returns:
        An Arrow stream of one batch of ``VALUE_COLUMN``, for the first keys that fit; null where there is no value.

    Raises:
        Invalid: Not such a stream.
    """
    key_groups, keys = read_columns(wanted, KEY_COLUMNS)
    found = table.get_values(state, np.asarray(key_groups), keys)
    offsets = value_offsets(found)
    if int(offsets[-1]) - int(offsets[0]) > max_bytes:
        fitting = int(np.searchsorted(offsets[1:], int(offsets[0]) + max_bytes, side="right"))
        found = found.slice(0, max(1, fitting))
    return write_columns(VALUE_COLUMN, [found])


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


def bounded_entries(
    found: Sequence[list[tuple[bytes, bytes]]], max_bytes: int
) -> list[list[tuple[bytes, bytes]] | None]:
    """Return the entries of each key, None where they are more than ``max_bytes``: those are read page by page.

    Keys at the end are None too once the reply has grown to four times ``max_bytes``; the first key that fits is
    always answered.
    """
    total = 0
    bounded: list[list[tuple[bytes, bytes]] | None] = []
    for entries in found:
        size = sum(len(user_key) + len(value) for user_key, value in entries)
        fits = size <= max_bytes and total + size <= _REPLY_FACTOR * max_bytes
        bounded.append(entries if fits else None)
        total += size if fits else 0
    return bounded


def entries_after(
    table: StateTable, state: int, key_group: int, key: bytes, after: bytes | None, max_bytes: int
) -> list[tuple[bytes, bytes]]:
    """Return one key's next entries in user key order, strictly after ``after``: about ``max_bytes``, at least one.

    No collection has an entry under the empty user key, which is a value state's.
    """
    page: list[tuple[bytes, bytes]] = []
    size = 0
    last = after or b""
    while size < max_bytes:
        # The smallest key above this one is this one with a zero byte behind it.
        found = table.scan(state, key_group, after=(key, last), before_key=key + b"\0", limit=_PAGE)
        for entry in found:
            if page and size + len(entry.value) > max_bytes:
                return page
            page.append((entry.user_key, entry.value))
            size += len(entry.user_key) + len(entry.value)
        if len(found) < _PAGE:
            break
        last = found[-1].user_key
    return page


class Due(NamedTuple):
    """A page of due entries.

    Attributes:
        entries: An Arrow stream of ``ENTRY_COLUMNS``.
        more: Whether there are more behind it.
    """

    entries: memoryview
    more: bool


def due_entries(
    index: ExpiryIndex, key_groups: Sequence[int], until: int, skip: int, with_values: bool, max_bytes: int
) -> Due:
    """Return entries that are due, key group by key group.

    Args:
        index: The entries by time.
        key_groups: Where to look.
        until: Due is a time at or below this.
        skip: How many were returned before; the rest comes, about ``max_bytes`` of it, at least one entry if there is
            one.
        with_values: Whether values are wanted; without, they are empty.
        max_bytes: Of keys and values.
    """
    parts: list[pa.RecordBatch] = []
    more = False
    for key_group in key_groups:
        keys, values = index.due(key_group, until, with_values=with_values)
        if skip >= len(keys):
            skip -= len(keys)
            continue
        keys, values = keys.slice(skip), values.slice(skip)
        skip = 0
        sizes = np.cumsum(np.diff(value_offsets(keys)) + np.diff(value_offsets(values)).astype(np.int64))
        count = max(0 if parts else 1, int(np.searchsorted(sizes, max_bytes, side="right")))
        count = min(count, len(keys))
        groups = pa.array(np.full(count, key_group, np.uint16))
        parts.append(pa.RecordBatch.from_arrays([groups, keys[:count], values[:count]], schema=ENTRY_COLUMNS))
        more = count < len(keys)
        if more:
            break
        max_bytes -= int(sizes[-1])
    return Due(_stream(parts), more)


def next_values(table: StateTable, state: int, key_group: int, after: bytes | None, max_bytes: int) -> memoryview:
    """Return the next values of one key group of a point state, in the order of their keys, strictly after a key.

    Returns:
        An Arrow stream of ``ENTRY_COLUMNS``: about ``max_bytes``, at least one entry if there is one.
    """
    keys: list[bytes] = []
    values: list[bytes] = []
    size = 0
    last = None if after is None else (after, b"")
    while size < max_bytes:
        found = table.scan(state, key_group, after=last, limit=_PAGE)
        keys += [entry.key for entry in found]
        values += [entry.value for entry in found]
        if len(found) < _PAGE:
            break
        size += sum(len(entry.key) + len(entry.value) for entry in found)
        last = found[-1].key, b""
    columns = [pa.array(np.full(len(keys), key_group, np.uint16)), pa.array(keys, pa.binary())]
    return write_columns(ENTRY_COLUMNS, [*columns, pa.array(values, pa.binary())])


def _stream(parts: Sequence[pa.RecordBatch]) -> memoryview:
    whole = pa.Table.from_batches(parts, ENTRY_COLUMNS).combine_chunks()
    columns = [column.chunk(0) if column.num_chunks else pa.array([], column.type) for column in whole.columns]
    return write_columns(ENTRY_COLUMNS, columns)
