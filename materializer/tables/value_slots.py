"""Values of one length by their keys: a dictionary of places, and the values side by side in one array.

What is asked for, or put, a column at a time costs one look-up per key and no Python object per value.
"""

from __future__ import annotations

import threading
from collections.abc import ItemsView, Iterable, Iterator, KeysView, Mapping, MutableMapping, Sequence
from itertools import repeat
from typing import Any

import numpy as np
import numpy.typing as npt

FixedValues = npt.NDArray[np.void]
"""Values of one length, one item each."""

_FEWEST = 16  # a state of few keys starts without growing
_PLACES: list[int] = []
"""The number of each place as one object, which all groups share: 32 bytes less for a key."""
_PLACES_LOCK = threading.Lock()


class ValueSlots(MutableMapping[bytes, bytes]):
    """A dictionary of values that all have one length, with bulk operations. Not thread-safe.

    A place that a deleted key leaves is taken by a later one. Where many are left, values are moved together.

    Args:
        width: Length of every value, above 0.

    Attributes:
        width: The same.
    """

    __slots__ = ("_free", "_slots", "_values", "width")

    def __init__(self, width: int) -> None:
        self.width = width
        self._slots: dict[bytes, int] = {}
        self._free: list[int] = []
        self._values: FixedValues = np.zeros(_FEWEST, f"V{width}")

    def __len__(self) -> int:
        return len(self._slots)

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._slots)

    def __contains__(self, key: object) -> bool:
        return key in self._slots

    def __getitem__(self, key: bytes) -> bytes:
        value: bytes = self._values[self._slots[key]].tobytes()
        return value

    def __setitem__(self, key: bytes, value: bytes) -> None:
        """Set one value.

        Raises:
            ValueError: It is of another length.
        """
        if len(value) != self.width:
            raise ValueError(f"a value of {len(value)} bytes among values of {self.width}")
        self.put_all([key], np.frombuffer(value, self._values.dtype))

    def __delitem__(self, key: bytes) -> None:
        self._free.append(self._slots.pop(key))

    def get(self, key: bytes, default: Any = None) -> Any:
        """Return one value."""
        slot = self._slots.get(key)
        return default if slot is None else self._values[slot].tobytes()

    def keys(self) -> KeysView[bytes]:
        """Return the keys, in no order that means anything."""
        return self._slots.keys()

    def items(self) -> ItemsView[bytes, bytes]:
        """Return keys and values as of now."""
        return dict(zip(self._slots, self.fixed_values().tolist(), strict=True)).items()

    def copy(self) -> ValueSlots:
        """Return another one of the same content."""
        twin = ValueSlots(self.width)
        twin._slots, twin._free, twin._values = self._slots.copy(), self._free.copy(), self._values.copy()
        return twin

    def fixed_values(self) -> FixedValues:
        """Return the values in the order of the keys, copied."""
        return self._values[np.fromiter(self._slots.values(), np.int64, len(self._slots))]

    def get_all(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """Return the value of each key, None where there is none."""
        slots = self._slots_of(keys)
        found: list[bytes | None] = self._values[slots].tolist()
        for missing in np.flatnonzero(slots < 0).tolist():
            found[missing] = None
        return found

    def take(self, keys: Sequence[bytes], out: FixedValues) -> npt.NDArray[np.bool_]:
        """Write the value of each key to ``out``, anything where there is none; return where there is one."""
        slots = self._slots_of(keys)
        out[:] = self._values[slots]
        there: npt.NDArray[np.bool_] = slots >= 0
        return there

    def put_all(self, keys: Sequence[bytes], values: FixedValues) -> int:
        """Set values; the last one of a repeated key wins. Return how many bytes the keys have that are new."""
        if not self._slots:
            return self._fill(keys, values.copy())
        slots = self._slots_of(keys)
        missing = np.flatnonzero(slots < 0)
        added = 0
        if len(missing):
            new = dict.fromkeys(keys if len(missing) == len(keys) else [keys[row] for row in missing.tolist()])
            added = sum(map(len, new))
            places = self._places(len(new))
            self._slots.update(zip(new, places, strict=True))
            slots[missing] = places if len(new) == len(missing) else self._slots_of([keys[r] for r in missing.tolist()])
        # Of several assignments to one place the last one stays.
        self._values[slots] = values
        return added

    def adopt_all(self, keys: Sequence[bytes], values: FixedValues) -> int:
        """Do what :meth:`put_all` does where there are no values yet, and go on with the array itself.

        Raises:
            ValueError: It is read-only, or there are values.
        """
        if self._slots or not values.flags.writeable:
            raise ValueError("values cannot be adopted: they are read-only, or not the first")
        return self._fill(keys, values)

    def pop_all(self, keys: Iterable[bytes]) -> list[bytes]:
        """Remove keys, none named twice; return those that were there."""
        named = list(keys)
        slots = list(map(self._slots.pop, named, repeat(-1)))
        if -1 in slots:
            named = [key for key, slot in zip(named, slots, strict=True) if slot >= 0]
            slots = [slot for slot in slots if slot >= 0]
        self._free += slots
        if len(self._values) > _FEWEST and len(self._slots) < len(self._values) // 4:
            self._gather()
        return named

    def _fill(self, keys: Sequence[bytes], values: FixedValues) -> int:
        if not keys:  # the array keeps a place at least, for lookups of a key that is not there
            return 0
        # Of a repeated key the last place stays.
        self._slots = dict(zip(keys, _places(0, len(keys)), strict=True))
        self._values = values
        repeated = len(keys) != len(self._slots)
        self._free = list(set(range(len(keys))).difference(self._slots.values())) if repeated else []
        return sum(map(len, self._slots))

    def _slots_of(self, keys: Sequence[bytes]) -> npt.NDArray[np.int64]:
        return np.fromiter(map(self._slots.get, keys, repeat(-1)), np.int64, len(keys))

    def _places(self, count: int) -> list[int]:
        """Return so many places that no key has."""
        left = max(0, len(self._free) - count)
        places = self._free[left:]
        del self._free[left:]
        used = len(self._slots) + len(self._free) + len(places)
        more = count - len(places)
        if used + more > len(self._values):
            grown = np.zeros(max(used + more, len(self._values) * 3 // 2), self._values.dtype)
            grown[:used] = self._values[:used]
            self._values = grown
        return places + _places(used, used + more)

    def _gather(self) -> None:
        """Move the values together, and give the rest of the memory back."""
        count = len(self._slots)
        values = np.zeros(max(_FEWEST, count * 3 // 2), self._values.dtype)
        values[:count] = self.fixed_values()
        self._slots = dict(zip(self._slots, _places(0, count), strict=True))
        self._values, self._free = values, []


def _places(start: int, stop: int) -> list[int]:
    with _PLACES_LOCK:
        if len(_PLACES) < stop:
            _PLACES.extend(range(len(_PLACES), stop * 9 // 8))
    return _PLACES[start:stop]


def fixed_values(values: Sequence[bytes] | FixedValues, width: int) -> FixedValues:
    """Return values of one length as an array."""
    if isinstance(values, np.ndarray):
        return values
    return np.frombuffer(b"".join(values), f"V{width}")


def as_dict(values: Mapping[bytes, bytes]) -> dict[bytes, bytes]:
    """Return a plain dictionary: values of any length fit it."""
    return values if isinstance(values, dict) else dict(values.items())
