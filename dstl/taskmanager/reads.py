"""Reads of collections out of a table, bounded so that one reply never holds more than was asked for."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from dstl.taskmanager.columns import KEY_COLUMNS, VALUE_COLUMN, read_columns, write_columns
from materializer.tables import StateTable

__all__ = ["Timer", "bounded_entries", "entries_after", "timers_until", "values_of"]

Timer = tuple[bytes, int, bytes]
"""Expiry (eight bytes that sort as the time does), key group and grouping key: the order in which timers fire."""

_PAGE = 512
_REPLY_FACTOR = 4


def values_of(table: StateTable, state: int, wanted: memoryview) -> memoryview:
    """Return the values of many keys of a point state.

    Args:
        table: Where to look.
        state: The state's number.
        wanted: An Arrow stream of one batch of ``KEY_COLUMNS``.

    Returns:
        An Arrow stream of one batch of ``VALUE_COLUMN``; null where there is no value.

    Raises:
        Invalid: Not such a stream.
    """
    key_groups, keys = read_columns(wanted, KEY_COLUMNS)
    found = table.get_many(state, np.asarray(key_groups), keys.to_pylist())
    return write_columns(VALUE_COLUMN, [pa.array(found, pa.binary())])


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


def timers_until(
    table: StateTable,
    state: int,
    key_groups: Sequence[int],
    until: bytes,
    after: tuple[int, bytes, bytes] | None,
    limit: int,
) -> list[tuple[int, bytes, bytes]]:
    """Return the next timers at or below ``until`` as (key group, key, expiry), ordered by (expiry, key group, key).

    Costs a pass over the key groups' timers: a table keeps them by key, as deleting one timer of a key needs it.
    """
    start: Timer | None = (after[2], after[0], after[1]) if after is not None else None
    due: list[Timer] = []
    for key_group in key_groups:
        seen: tuple[bytes, bytes] | None = None
        while True:
            page = table.scan(state, key_group, after=seen, limit=_PAGE)
            for entry in page:
                timer = (entry.user_key, key_group, entry.key)
                if entry.user_key <= until and (start is None or timer > start):
                    due.append(timer)
            if len(page) < _PAGE:
                break
            seen = (page[-1].key, page[-1].user_key)
    return [(key_group, key, expiry) for expiry, key_group, key in heapq.nsmallest(limit, due)]
