"""Keys and their places: the numbers under which an array beside them has their values.

Few keys, long ones, and keys of several lengths, are in a dictionary. Many short keys of one length lie side by side,
with chains of places by hash, all in arrays of numpy: a third of the memory, and a column of keys is found without an
object for each.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from itertools import repeat
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

FixedItems = npt.NDArray[np.void]
"""Bytes of one length, one item each."""

Keys = Sequence[bytes] | FixedItems
"""Keys in their order, side by side where all have one length."""

Places = npt.NDArray[np.signedinteger]

FEWEST_SIDE_BY_SIDE = 1 << 10
"""So many keys of one length lie side by side. Fewer stay in a cache, where a dictionary finds some of them in less
time, and the arrays' own headers would count."""

LONGEST_SIDE_BY_SIDE = 64
"""Longer keys are in a dictionary: they are hashed word by word, and what the arrays save is little beside them."""

ONE_BY_ONE = 8
"""So few keys are quicker found one by one than by calls of numpy for all of them."""

NO_KEY = -1
"""The place of a key that is not there."""

_NUMBERS: list[int] = []
"""The number of each place as one object, which all dictionaries share: 32 bytes less for a key."""
_LOCK = threading.Lock()


def names_of(keys: Keys) -> list[bytes]:
    """Return keys as a list."""
    return keys.tolist() if isinstance(keys, np.ndarray) else keys if isinstance(keys, list) else list(keys)


def side_by_side(keys: Keys) -> FixedItems | None:
    """Return keys side by side; None where their lengths differ, or are 0, or there are none."""
    if isinstance(keys, np.ndarray):
        return keys
    lengths = set(map(len, keys))
    width = lengths.pop() if len(lengths) == 1 else 0
    return np.frombuffer(b"".join(keys), f"V{width}") if width else None


class SortedItems:
    """Keys of one length in their order."""

    def __init__(self, keys: FixedItems) -> None:
        kind = ">u8" if keys.dtype.itemsize == 8 else f"S{keys.dtype.itemsize}"  # numbers are sorted faster than bytes
        self._keys = np.sort(keys.view(kind)).view(keys.dtype)

    def __len__(self) -> int:
        return len(self._keys)

    def __getitem__(self, at: int) -> bytes:
        key: Any = self._keys.item(at)
        return bytes(key)

    def part(self, start: int, stop: int) -> FixedItems:
        """Return the keys at these positions."""
        return self._keys[start:stop]


class KeyPlaces(Protocol):
    """Keys, each with a place of its own in ``[0, used)``. A place that a key leaves is taken by a later one.

    Attributes:
        used: No place is as high.
    """

    used: int

    def __len__(self) -> int: ...

    def names(self) -> Keys:
        """Return all keys, in the order of :meth:`all`."""

    def all(self) -> Places:
        """Return the places of all keys."""

    def get(self, key: bytes) -> int:
        """Return a key's place, below 0 where there is none."""

    def find(self, keys: Keys) -> Places:
        """Return the place of each key, below 0 where there is none."""

    def put(self, keys: Keys) -> tuple[Places, int]:
        """Give each key a place that has none, and return all places, and how many bytes the keys have that are new.

        A key may be named twice.
        """

    def pop(self, keys: Keys) -> int:
        """Take keys out, and return how many bytes those have that were there. A key may be named twice."""

    def copy(self) -> KeyPlaces:
        """Return another one of the same content."""


class KeyDictionary:
    """Keys of any length: see :class:`KeyPlaces`."""

    __slots__ = ("_free", "_places", "used")

    def __init__(self) -> None:
        self.used = 0
        self._places: dict[bytes, int] = {}
        self._free: list[int] = []

    def __len__(self) -> int:
        return len(self._places)

    def names(self) -> list[bytes]:
        """Return all keys."""
        return list(self._places)

    def all(self) -> Places:
        """Return the places of all keys."""
        return np.fromiter(self._places.values(), np.int64, len(self._places))

    def get(self, key: bytes) -> int:
        """Return a key's place."""
        return self._places.get(key, NO_KEY)

    def find(self, keys: Keys) -> Places:
        """Return the place of each key."""
        return np.fromiter(map(self._places.get, names_of(keys), repeat(NO_KEY)), np.int64, len(keys))

    def put(self, keys: Keys) -> tuple[Places, int]:
        """Give each key a place."""
        names = names_of(keys)
        if not self.used:
            first = dict(zip(names, _numbers(0, len(names)), strict=True))
            if len(first) == len(names):
                self._places, self.used = first, len(first)
                return np.arange(self.used), sum(map(len, names))
        found = self.find(names)
        missing = np.flatnonzero(found < 0)
        if not len(missing):
            return found, 0
        absent = names if len(missing) == len(names) else [names[row] for row in missing.tolist()]
        new = dict.fromkeys(absent)
        places = self._take(len(new))
        self._places.update(zip(new, places, strict=True))
        found[missing] = places if len(new) == len(missing) else self.find(absent)
        return found, sum(map(len, new))

    def pop(self, keys: Keys) -> int:
        """Take keys out."""
        names = names_of(keys)
        places = list(map(self._places.pop, names, repeat(NO_KEY)))
        if NO_KEY in places:
            names = [name for name, place in zip(names, places, strict=True) if place >= 0]
            places = [place for place in places if place >= 0]
        self._free += places
        return sum(map(len, names))

    def copy(self) -> KeyDictionary:
        """Return another one of the same content."""
        twin = KeyDictionary()
        twin._places, twin._free, twin.used = self._places.copy(), self._free.copy(), self.used
        return twin

    def _take(self, count: int) -> list[int]:
        left = max(0, len(self._free) - count)
        places = self._free[left:]
        del self._free[left:]
        start = self.used
        self.used += count - len(places)
        return places + _numbers(start, self.used)


def _numbers(start: int, stop: int) -> list[int]:
    with _LOCK:
        if len(_NUMBERS) < stop:
            _NUMBERS.extend(range(len(_NUMBERS), stop * 9 // 8))
    return _NUMBERS[start:stop]
