"""Timers: entries of a state of their own, whose user key is the expiry in eight bytes that sort as the time does.

All timers of a partition that are due are found by one read of its key groups (``StateClient.fetch_due``).
As in Spark, what fires in a batch is settled when input ends: a timer that a handler registers meanwhile waits for the
next batch, and one that a handler deletes fires nevertheless.
"""

from __future__ import annotations

import operator
import struct
from collections import Counter
from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from itertools import chain
from typing import Any

from dstl.errors import Invalid, brief
from dstl.state.codec.value_codec import TimeToLive
from dstl.state.descriptor import StateDescriptor
from dstl.state.entry_state import EntryState, StateAccess

_EXPIRY = struct.Struct(">Q")
_OFFSET = 1 << 63  # moves all signed milliseconds to unsigned ones, which sort as bytes do
_PAGE = 1024  # timers whose keys have their states fetched together

Timer = tuple[int, bytes, bytes]
"""Key group, grouping key and user key (the expiry, eight bytes that sort as the time does)."""
_Order = tuple[bytes, int, bytes]
"""User key, key group, key: the order in which timers fire."""


def expiry_user_key(expiry_ms: int) -> bytes:
    """Return the user key of a timer; its bytes sort as the milliseconds do, negative ones included."""
    return _EXPIRY.pack(expiry_ms + _OFFSET)


def expiry_ms(user_key: bytes) -> int:
    """Return the milliseconds that :func:`expiry_user_key` was given."""
    found: int = _EXPIRY.unpack(user_key)[0]
    return found - _OFFSET


class Timers(EntryState):
    """The timers of the grouping keys.

    Args:
        descriptor: What is stored under which number.
        access: Leads to the timers.
    """

    def __init__(self, descriptor: StateDescriptor, access: StateAccess) -> None:
        super().__init__(descriptor, access, TimeToLive(0, 0))
        self._stored: list[_Order] = []
        self._until: bytes | None = None
        self._awaited: dict[bytes, int] = {}

    @property
    def awaited(self) -> AbstractSet[bytes]:
        """Keys whose timers are still to fire in this run: what was written for them is going to be read."""
        return self._awaited.keys()

    def begin(self, until_ms: int, key_groups: Sequence[int]) -> None:
        """Read, before the first row, which stored timers are due at ``until_ms`` (milliseconds since 1970, included).

        Args:
            until_ms: The batch's time or watermark.
            key_groups: The partition's.
        """
        self._until = expiry_user_key(until_ms)
        number = int.from_bytes(self._until, "big")
        pages = self._source.fetch_due(self._state, key_groups, None, number, with_values=True)
        columns = ([page.column(name).to_pylist() for name in ("value", "key_group", "key")] for page in pages)
        self._stored = [timer for page in columns for timer in zip(*page, strict=True)]
        self._awaited = dict.fromkeys((key for _, _, key in self._stored), 1)

    def register(self, at_ms: int) -> None:
        """Register a timer of the current key; the same twice is one. A moment that has passed fires in this batch.

        Raises:
            Invalid: Not a whole number of milliseconds.
        """
        user_key = self._user_key(at_ms)
        self._put(user_key, b"")
        if self._until is not None and user_key <= self._until:
            self._awaited[self._window.keys[self._window.index]] = 1

    def delete(self, at_ms: int) -> None:
        """Delete a timer of the current key; nothing happens where there is none."""
        self._put(self._user_key(at_ms), None)

    def of_key(self) -> Iterator[int]:
        """Iterate over the current key's timers as they are now, earliest first."""
        return (expiry_ms(user_key) for user_key, _ in self._items())

    def due(self) -> Iterator[list[Timer]]:
        """Iterate over pages of the timers that are due, earliest first, as they are at the call, when input has ended.

        A key is no longer awaited once the page of its last timer is done with.
        """
        until, self._until = self._until, None
        assert until is not None, "begin() comes first"
        added: list[_Order] = []
        settled: set[_Order] = set()
        for key_group, key in self._overlay.keys_with_entries(self._state):
            for user_key, value in self._overlay.written_entries(self._state, key)[1].items():
                if user_key <= until:
                    settled.add((user_key, key_group, key))
                    if value is not None:
                        added.append((user_key, key_group, key))
        due = sorted(chain(added, (one for one in self._stored if one not in settled)))
        self._stored = []
        self._awaited = Counter(key for _, _, key in due)
        return self._in_turn(due)

    def _in_turn(self, due: list[_Order]) -> Iterator[list[Timer]]:
        for at in range(0, len(due), _PAGE):
            page = [(key_group, key, user_key) for user_key, key_group, key in due[at : at + _PAGE]]
            yield page
            for _, key, _ in page:
                self._awaited[key] -= 1
                if not self._awaited[key]:
                    del self._awaited[key]

    def _user_key(self, at_ms: Any) -> bytes:
        if isinstance(at_ms, float) and at_ms.is_integer():
            at_ms = int(at_ms)  # as pandas has integers beside a null; Spark takes them, too
        try:
            return expiry_user_key(operator.index(at_ms))
        except (TypeError, struct.error):
            raise Invalid(f"a timer is a whole number of milliseconds since 1970, not {brief(at_ms)}") from None
