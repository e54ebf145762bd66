"""Values of one length by their keys: a place for each key, and the values side by side in one array.

What is asked for, or put, a column at a time costs no Python object per value, and where keys have one length too, none
per key.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from materializer.tables.key_column import KeyColumn, grown
from materializer.tables.key_places import (
    FEWEST_SIDE_BY_SIDE,
    LONGEST_SIDE_BY_SIDE,
    ONE_BY_ONE,
    FixedItems,
    KeyDictionary,
    KeyPlaces,
    Keys,
    names_of,
    side_by_side,
)

_WIDE = 64  # bytes: such values cost more to copy than keys to find, so that their arrays grow by half
_FEWEST = 16  # a state of few keys starts without growing


class ValueSlots(MutableMapping[bytes, bytes]):
    """A dictionary of values that all have one length, with bulk operations. Not thread-safe.

    A place that a deleted key leaves is taken by a later one. Where many are left, values are moved together.

    Args:
        width: Length of every value, above 0.

    Attributes:
        width: The same.
    """

    __slots__ = ("_places", "_values", "width")

    def __init__(self, width: int) -> None:
        self.width = width
        self._places: KeyPlaces = KeyDictionary()
        self._values: FixedItems = np.zeros(_FEWEST, f"V{width}")

    def __len__(self) -> int:
        return len(self._places)

    def __iter__(self) -> Iterator[bytes]:
        return iter(names_of(self._places.names()))

    def __contains__(self, key: object) -> bool:
        return isinstance(key, bytes) and self._places.get(key) >= 0

    def __getitem__(self, key: bytes) -> bytes:
        value: bytes | None = self.get(key)
        if value is None:
            raise KeyError(key)
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
        if key not in self:
            raise KeyError(key)
        self.pop_all([key])

    def get(self, key: bytes, default: Any = None) -> Any:
        """Return one value."""
        place = self._places.get(key)
        return default if place < 0 else self._values.item(place)

    def copy(self) -> ValueSlots:
        """Return another one of the same content."""
        twin = ValueSlots(self.width)
        twin._places, twin._values = self._places.copy(), self._values.copy()
        return twin

    def names(self) -> Keys:
        """Return the keys, in no order that means anything."""
        return self._places.names()

    def fixed_values(self) -> FixedItems:
        """Return the values in the order of :meth:`names`, copied."""
        return self._values[self._places.all()]

    def get_all(self, keys: Keys) -> list[bytes | None]:
        """Return the value of each key, None where there is none."""
        if len(keys) <= ONE_BY_ONE:
            return list(map(self.get, names_of(keys)))
        places = self._places.find(keys)
        found: list[bytes | None] = self._values.take(places).tolist()
        for missing in (places < 0).nonzero()[0].tolist():
            found[missing] = None
        return found

    def take(self, keys: Keys, out: FixedItems) -> npt.NDArray[np.bool_]:
        """Write the value of each key to ``out``, anything where there is none; return where there is one."""
        places = self._places.find(keys)
        out[:] = self._values.take(places)
        there: npt.NDArray[np.bool_] = places >= 0
        return there

    def put_all(self, keys: Keys, values: FixedItems, *, owned: bool = False) -> int:
        """Set values; the last one of a repeated key wins. Return how many bytes the keys have that are new.

        Args:
            keys: The keys.
            values: Their values.
            owned: The array can be written, and is not used elsewhere: where there are no values yet, it may be kept.
        """
        held = len(self)
        if not held:
            self._places = _places_for(keys)
        elif isinstance(self._places, KeyColumn) and not self._places.takes(keys):
            self._number_anew(KeyDictionary())
        places, added = self._places.put(keys)
        if not held and len(self) == len(keys) > 0:
            # No key came twice, so the places are in the order of the keys.
            self._values = values if owned else values.copy()
            return added
        if self._places.used > len(self._values):
            part = 4 if self.width < _WIDE else 2
            self._values = grown(self._values, len(self._values), self._places.used, part)
        # Of several assignments to one place the last one stays.
        self._values[places] = values
        if held < FEWEST_SIDE_BY_SIDE <= len(self) and isinstance(self._places, KeyDictionary):
            self._number_anew(_places_for(self.names()))
        else:
            self._shrink()  # a key that came often had a place for each time
        return added

    def pop_all(self, keys: Keys) -> int:
        """Remove keys, of which one may be named twice; return how many bytes those have that were there."""
        gone = self._places.pop(keys)
        self._shrink()
        return gone

    def _shrink(self) -> None:
        """Give memory back where most of it has no value."""
        if len(self._values) > _FEWEST and len(self) < len(self._values) // 4:
            self._number_anew(_places_for(self.names()))

    def _number_anew(self, places: KeyPlaces) -> None:
        """Move keys to other places, and their values together, and give the rest of the memory back."""
        old = self._places.all()
        places.put(self.names())
        self._places = places
        # Values that lie together already, and without much room behind them, stay where they are.
        if len(self._values) // 4 > len(old) or not np.array_equal(old, np.arange(len(old))):
            values = self._values[old]
            self._values = grown(values, len(values), _FEWEST)


def _places_for(keys: Keys) -> KeyPlaces:
    """Return what suits such keys."""
    items = side_by_side(keys) if len(keys) >= FEWEST_SIDE_BY_SIDE else None
    width = LONGEST_SIDE_BY_SIDE + 1 if items is None else items.dtype.itemsize
    return KeyColumn(width) if width <= LONGEST_SIDE_BY_SIDE else KeyDictionary()


def fixed_values(values: Sequence[bytes] | FixedItems, width: int) -> FixedItems:
    """Return values of one length as an array."""
    if isinstance(values, np.ndarray):
        return values
    return np.frombuffer(b"".join(values), f"V{width}")


def as_dict(values: Mapping[bytes, bytes]) -> dict[bytes, bytes]:
    """Return a plain dictionary: values of any length fit it."""
    if isinstance(values, ValueSlots):
        return dict(zip(names_of(values.names()), values.fixed_values().tolist(), strict=True))
    return values if isinstance(values, dict) else dict(values.items())
