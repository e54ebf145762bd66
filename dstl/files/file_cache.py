"""A cache of fetched files, for all checkpoint directories of a process together, within one byte budget."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

_LIMIT = 256 << 20
"""Four restores of files of 64 MB, the size of RocksDB's, side by side."""
_LONGEST_STRETCH = 16 << 20
"""Four parts of a JVM's reads: at 90 MB/s a connection, the 63 ms to its first byte are then a quarter of the time."""

_ENTRY_BYTES = 1 << 10
"""What an entry takes beside its content, as measured with small files: keys, numbers, objects."""


@dataclass(frozen=True, slots=True)
class Stretch:
    """Neighbouring bytes of one file.

    Attributes:
        start: The place of the first one.
        content: The bytes.
        is_passing: The file has several parts, which are read one after the other, mostly once.
    """

    start: int
    content: bytes
    is_passing: bool = False

    def holds(self, offset: int) -> bool:
        """Return True where the byte at a place is one of them, and for the beginning of an empty file."""
        return self.start <= offset < self.start + max(1, len(self.content))


class FileCache:
    """Keeps what was used last. One event loop.

    Of a file of several parts the latest stretch is kept, until the file's end was read.

    Args:
        limit: Bytes that it takes at most. More: fewer requests when partitions move, and longer stretches while many
            files are restored side by side; less: less memory of each process.

    Attributes:
        used: The bytes that it takes; at most ``limit``.
    """

    def __init__(self, limit: int = _LIMIT) -> None:
        self.used = 0
        self._limit = limit
        self._entries: OrderedDict[tuple[object, ...], tuple[object, int]] = OrderedDict()
        self._streams = 0

    @property
    def stretch(self) -> int:
        """The bytes of a file that are worth fetching at once, so that what is read side by side stays here."""
        return min(_LONGEST_STRETCH, self._limit // (2 * (self._streams + 1)))

    def find(self, key: tuple[object, ...]) -> object | None:
        """Return what is kept under a key."""
        found = self._entries.get(key)
        if found is None:
            return None
        self._entries.move_to_end(key)
        return found[0]

    def keep(self, key: tuple[object, ...], value: object, nbytes: int) -> None:
        """Keep something in place of what was under its key, and let go of the oldest where that is too much."""
        self.drop(key)
        nbytes += _ENTRY_BYTES
        if nbytes > self._limit:
            return
        self._entries[key] = value, nbytes
        self.used += nbytes
        self._streams += _is_passing(value)
        while self.used > self._limit:
            self.drop(next(iter(self._entries)))

    def drop(self, key: tuple[object, ...]) -> None:
        """Let go of what is under a key, if anything is."""
        value, nbytes = self._entries.pop(key, (None, 0))
        self.used -= nbytes
        self._streams -= _is_passing(value)

    def drop_all_of(self, owner: object) -> None:
        """Let go of what is under keys that begin with an owner: it is closed."""
        for key in [key for key in self._entries if key[0] is owner]:
            self.drop(key)


def _is_passing(value: object) -> bool:
    return isinstance(value, Stretch) and value.is_passing
