"""The base of list, map and timer states: entries of each grouping key, ordered by the bytes of their user keys.

Entries are fetched for several coming keys at once, more the smaller they turn out to be. A key whose entries are too
many is never fetched whole: single entries are read one by one, and iteration goes page by page.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from dstl.errors import Invalid
from dstl.rpc.state_client import Entry, StateClient
from dstl.state.codec.value_codec import TimeToLive
from dstl.state.descriptor import StateDescriptor
from dstl.state.key_window import KeyWindow
from dstl.state.overlay import EntryWrites, Overlay
from dstl.state.processor_errors import why_unusable

_FETCH_BYTES = 1 << 20
"""About what one fetch for several keys should bring."""
_MAX_KEYS = 4096  # a fetch for more would wait for rows that may never be looked at
_MAX_POINTS = 10_000  # some megabytes of a key that is too large to be held whole


@dataclass(frozen=True, slots=True)
class StateAccess:
    """Access to entries, the same for all states of a task.

    Attributes:
        window: The keys in hand.
        source: Prior state.
        overlay: Own writes.
    """

    window: KeyWindow
    source: StateClient
    overlay: Overlay


class EntryState:
    """Holds the entries of the window's keys.

    Args:
        descriptor: What is stored under which number.
        access: Leads to the entries.
        ttl: Their time to live.
    """

    whole_bytes: ClassVar[int] = 256 << 10
    """A key with more bytes of entries than this is read piece by piece."""

    def __init__(self, descriptor: StateDescriptor, access: StateAccess, ttl: TimeToLive) -> None:
        self.descriptor = descriptor
        self._state = descriptor.state_id
        self._window = access.window
        self._ttl = ttl
        self._source = access.source
        self._overlay = access.overlay
        self._ahead = 16
        self._fetched: dict[int, list[Entry]] = {}
        self._whole: dict[int, dict[bytes, bytes]] = {}
        self._large: set[int] = set()
        self._points: dict[bytes, bytes | None] = {}
        self._at = -1
        self._writes: EntryWrites | None = None
        self._deleted = False

    def retire(self) -> None:
        """Refuse every use from now on but iteration, which finds nothing, as in Spark."""
        self._deleted = True
        self._window = KeyWindow()  # one that never has a key

    def open_window(self) -> None:
        """Forget the keys of the window before. The overlay may only be drained between two windows."""
        self._fetched, self._whole, self._points = {}, {}, {}
        self._large.clear()
        self._at, self._writes = -1, None

    close_window = open_window

    def _switch(self) -> int:
        """Return the current key's position; called first by every operation.

        Raises:
            Invalid: There is no current key.
        """
        index = self._window.index
        if index != self._at:
            if self._window.forward:
                # Keys come once: nothing of those before is read again.
                self._whole.clear()
            self._points, self._writes, self._at = {}, None, index
        if index < 0:
            raise Invalid(why_unusable(self.descriptor.name, deleted=self._deleted))
        return index

    def _entries(self) -> dict[bytes, bytes] | None:
        """Return the current key's entries, own writes included; None where there are too many."""
        index = self._switch()
        whole = self._whole.get(index)
        if whole is None and index not in self._large:
            whole = self._load(index)
        return whole

    def _load(self, index: int) -> dict[bytes, bytes] | None:
        key = self._window.keys[index]
        cleared, written = self._overlay.written_entries(self._state, key)
        base: list[Entry] | None = []
        if not cleared:
            base = self._fetched.pop(index, None) if index in self._fetched else self._fetch(index)
        if base is None:
            self._large.add(index)
            return None
        whole = dict(base)
        if self._ttl.ttl_ms:
            for user_key in [u for u, value in whole.items() if self._ttl.is_dead(value)]:
                del whole[user_key]
        for user_key, value in written.items():
            if value is None:
                whole.pop(user_key, None)
            else:
                whole[user_key] = value
        self._whole[index] = whole
        return whole

    def _fetch(self, index: int) -> list[Entry] | None:
        window = self._window
        stop = min(len(window.keys), index + self._ahead)
        found = self._source.fetch_entries(
            self._state, window.key_groups[index:stop], window.keys[index:stop], self.whole_bytes
        )
        size = 0
        for position, entries in enumerate(found[1:], start=index + 1):
            if entries is not None:
                self._fetched[position] = entries
                size += sum([len(u) + len(v) for u, v in entries])
        if size < _FETCH_BYTES:
            self._ahead = min(self._ahead * 2, _MAX_KEYS)
        else:
            self._ahead = max(self._ahead // 2, 1)
        if found[0] is None and stop > index + 1:
            # Its neighbours may have filled the reply: only alone does None mean too large.
            found = self._source.fetch_entries(
                self._state, window.key_groups[index : index + 1], window.keys[index : index + 1], self.whole_bytes
            )
        return found[0]

    def _find(self, user_key: bytes) -> bytes | None:
        """Return one entry of the current key."""
        whole = self._entries()
        if whole is not None:
            return whole.get(user_key)
        if user_key not in self._points:
            if len(self._points) >= _MAX_POINTS:
                self._points.clear()
            self._points[user_key] = self._find_alone(user_key)
        return self._points[user_key]

    def _find_alone(self, user_key: bytes) -> bytes | None:
        window, index = self._window, self._at
        cleared, written = self._overlay.written_entries(self._state, window.keys[index])
        if user_key in written or cleared:
            return written.get(user_key)
        found = self._source.fetch_entry(self._state, window.key_groups[index], window.keys[index], [user_key])[0]
        return None if found is not None and self._ttl.is_dead(found) else found

    def _items(self) -> Iterator[Entry]:
        """Iterate over the current key's entries in user-key order, as they are now."""
        if self._deleted:
            return iter(())
        whole = self._entries()
        if whole is not None:
            return iter(sorted(whole.items()))
        key_group, key = self._window.key_groups[self._at], self._window.keys[self._at]
        # Here and not in the generator, which begins when it is first asked: what is written until then is not seen.
        _, written = self._overlay.written_entries(self._state, key)
        return self._pages(key_group, key, written)

    def _pages(self, key_group: int, key: bytes, written: dict[bytes, bytes | None]) -> Iterator[Entry]:
        own = sorted(written.items())
        at, after = 0, None
        while page := self._source.scan_entries(self._state, key_group, key, after, self.whole_bytes):
            after = page[-1][0]
            for entry in page:
                while at < len(own) and own[at][0] < entry[0]:
                    if own[at][1] is not None:
                        yield own[at]  # type: ignore[misc]
                    at += 1
                if entry[0] not in written and not self._ttl.is_dead(entry[1]):
                    yield entry
        for user_key, value in own[at:]:
            if value is not None:
                yield user_key, value

    def _any(self) -> bool:
        """Return True where the current key has an entry."""
        whole = self._entries()
        if whole is not None:
            return bool(whole)
        return next(self._items(), None) is not None

    def _put(self, user_key: bytes, value: bytes | None) -> None:
        """Write one entry of the current key; None removes it."""
        index = self._switch()
        self._write(user_key, value)
        whole = self._whole.get(index)
        if whole is None:
            self._points.pop(user_key, None)
        elif value is None:
            whole.pop(user_key, None)
        else:
            whole[user_key] = value

    def _next_number(self) -> int:
        """Return how often this was called for the current key in this task."""
        self._switch()
        writes = self._writes or self._record()
        writes.numbered += 1
        return writes.numbered - 1

    def _record(self) -> EntryWrites:
        """Return the record of the current key's writes."""
        index = self._at
        writes = self._overlay.entry_writes(self._state, self._window.key_groups[index], self._window.keys[index])
        self._writes = writes
        return writes

    def _write(self, user_key: bytes, value: bytes | None) -> None:
        writes = self._writes or self._record()
        writes.entries[user_key] = value
        self._overlay.count_bytes(len(user_key) + (len(value) if value is not None else 0))

    def _clear(self) -> None:
        """Remove all entries of the current key."""
        index = self._switch()
        writes = self._record()
        writes.cleared = True
        writes.entries.clear()
        self._large.discard(index)
        self._fetched.pop(index, None)
        self._points = {}
        self._whole[index] = {}
