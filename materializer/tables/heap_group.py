"""The entries of one state in one key group of a heap table: a base, and a layer of changes beside a snapshot."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from itertools import repeat
from typing import TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from materializer.tables.base import ExpiredValue
from materializer.tables.columns import PageBuilder, binary_column, key_column
from materializer.tables.key_places import FixedItems, Keys, SortedItems, names_of
from materializer.tables.value_slots import ValueSlots, as_dict, fixed_values

T = TypeVar("T")

_NOTHING: Mapping[bytes, bytes] = {}

Points = dict[bytes, bytes] | ValueSlots


class HeapGroup:
    """One state in one key group.

    A group that a snapshot shows is never written: :meth:`fork` makes another one over the same dictionaries, whose
    changes go to a layer of their own. So the first write after a snapshot costs what it writes, not what the group
    holds. Once no snapshot is open, :meth:`settle` folds the layer in, again at the price of what was written.

    Invariants:
        1. With layers, ``points`` and ``elements`` (and the dictionaries in it) are not written.
        2. None in a layer means deleted, and stands only over a key of the base.
        3. No inner dictionary is empty.

    Attributes:
        points: Values under the empty user key: side by side in an array while all have one length.
        elements: Values under other user keys, by key, then user key.
        point_layer: Changes to ``points``; None: there are no layers, the base is written.
        element_layer: The same for ``elements``: whole inner dictionaries, owned by this group.
        point_width: Length of every value under the empty user key; -1 before there is one, None where they differ.
        epoch: The table's epoch when the group was made; a snapshot of this epoch or a later one shows it.
        entries: Number of entries.
        bytes: Bytes of keys, user keys and values.
    """

    __slots__ = (
        "_order",
        "_order_version",
        "bytes",
        "element_layer",
        "elements",
        "entries",
        "epoch",
        "point_layer",
        "point_width",
        "points",
    )

    def __init__(self, epoch: int) -> None:
        self.points: Points = {}
        self.elements: dict[bytes, dict[bytes, bytes]] = {}
        self.point_layer: dict[bytes, bytes | None] | None = None
        self.element_layer: dict[bytes, dict[bytes, bytes] | None] | None = None
        self.point_width: int | None = -1
        self.epoch = epoch
        self.entries = 0
        self.bytes = 0
        self._order: list[bytes] | SortedItems = []
        self._order_version = -1

    def fork(self, epoch: int) -> HeapGroup:
        """Return a group of the same content that may be written while this one is shown.

        Layers of this group are merged into a copied base: only overlapping snapshots pay for that.
        """
        twin = HeapGroup(epoch)
        twin.points = self.points if not self.point_layer else self._merged_points()
        twin.elements = self.elements if not self.element_layer else self._merged_elements()
        twin.point_layer, twin.element_layer = {}, {}
        twin.point_width = self.point_width
        twin.entries, twin.bytes = self.entries, self.bytes
        twin._order, twin._order_version = self._order, self._order_version
        return twin

    def settle(self) -> None:
        """Fold the layers into the base; only while no snapshot is open."""
        if self.point_layer:
            self.points = self._with_layer(self.points, self.point_layer)
        if self.element_layer:
            self.elements = _fold(self.elements, self.element_layer)
        self.point_layer = self.element_layer = None
        if not self.point_width:
            self.points = as_dict(self.points)

    @property
    def has_points_alone(self) -> bool:
        """True where no value lies under another than the empty user key."""
        return not self.elements and not self.element_layer

    def get(self, key: bytes) -> bytes | None:
        """Return the value under the empty user key."""
        value = self.points.get(key)
        return self.point_layer.get(key, value) if self.point_layer else value

    def get_all(self, keys: Keys) -> Iterable[bytes | None]:
        """Return the values of keys under the empty user key, to be walked once."""
        if isinstance(self.points, ValueSlots):
            values: Iterable[bytes | None] = self.points.get_all(keys)
        else:
            values = map(self.points.get, names_of(keys))
        return map(self.point_layer.get, names_of(keys), values) if self.point_layer else values

    def elements_of(self, key: bytes) -> Mapping[bytes, bytes]:
        """Return the key's values by user key, without the empty one. Not to be written."""
        inner = self.elements.get(key)
        if self.element_layer:
            inner = self.element_layer.get(key, inner)
        return _NOTHING if inner is None else inner

    def items(self, key: bytes) -> list[tuple[bytes, bytes]]:
        """Return the key's (user key, value), sorted by user key."""
        found = sorted(self.elements_of(key).items())
        value = self.get(key)
        if value is not None:
            found.insert(0, (b"", value))
        return found

    def put_all(
        self,
        keys: Keys,
        values: Sequence[bytes] | FixedItems,
        width: int | None = None,
        *,
        owned: bool = False,
    ) -> None:
        """Set values under the empty user key; the last one of a repeated key wins.

        Args:
            keys: The keys.
            values: Their values.
            width: Length of every value; None where they differ, or it is unknown.
            owned: ``values`` is an array that can be written and is not used elsewhere: a group without values may keep
                it as it is.
        """
        if self.point_width != width or width is None:
            self._set_width(width)
        if self.point_layer is None and self.point_width:
            if not isinstance(self.points, ValueSlots):
                slots = ValueSlots(self.point_width)
                slots.put_all(list(self.points), fixed_values(list(self.points.values()), self.point_width))
                self.points = slots
            held = len(self.points)
            self.bytes += self.points.put_all(keys, fixed_values(values, self.point_width), owned=owned)
            new = len(self.points) - held
            self.entries += new
            self.bytes += new * self.point_width
            return
        if not isinstance(values, list):
            values = values.tolist() if isinstance(values, np.ndarray) else list(values)
        fresh = dict(zip(names_of(keys), values, strict=True))
        before = list(self.get_all(list(fresh)))
        missing = before.count(None)
        added = sum(map(len, fresh.values()))
        if missing:
            if missing == len(before):
                added += sum(map(len, fresh))
            else:
                added += sum(len(key) for key, old in zip(fresh, before, strict=True) if old is None)
        self.bytes += added - sum(map(len, filter(None, before)))
        self.entries += missing
        if self.point_layer is None:
            self.points.update(fresh)
        else:
            self.point_layer.update(fresh)

    def delete_all(self, keys: Keys) -> None:
        """Remove the values of keys under the empty user key, of those that have one; a key may be named twice."""
        layer = self.point_layer
        if layer is None and isinstance(self.points, ValueSlots):
            held = len(self.points)
            self.bytes -= self.points.pop_all(keys)
            gone_keys = held - len(self.points)
            self.entries -= gone_keys
            self.bytes -= gone_keys * self.points.width
            return
        distinct = dict.fromkeys(names_of(keys))
        taken = map(self.points.pop, distinct, repeat(None)) if layer is None else self.get_all(list(distinct))
        gone = list(taken)
        there = len(gone) - gone.count(None)
        if not there:
            return
        present: Iterable[bytes] = distinct
        if there < len(gone):
            present = [key for key, old in zip(distinct, gone, strict=True) if old is not None]
        self.entries -= there
        self.bytes -= sum(map(len, present)) + sum(map(len, filter(None, gone)))
        if layer is not None:
            added = [key for key in present if key not in self.points]
            layer.update(dict.fromkeys(present))
            deque(map(layer.pop, added), maxlen=0)

    def put(self, key: bytes, user_key: bytes, value: bytes) -> None:
        """Set one entry."""
        if user_key:
            inner = self._owned_elements(key)
            old = inner.get(user_key)
            inner[user_key] = value
        else:
            if self.point_width != len(value):
                self._set_width(len(value))
            old = self.get(key)
            if self.point_layer is None:
                self.points[key] = value
            else:
                self.point_layer[key] = value
        if old is None:
            self.entries += 1
            self.bytes += len(key) + len(user_key) + len(value)
        else:
            self.bytes += len(value) - len(old)

    def delete(self, key: bytes, user_key: bytes) -> None:
        """Remove one entry, if it is there."""
        old = self.elements_of(key).get(user_key) if user_key else self.get(key)
        if old is None:
            return
        self.entries -= 1
        self.bytes -= len(key) + len(user_key) + len(old)
        if not user_key:
            _remove(key, self.points, self.point_layer)
            return
        inner = self._owned_elements(key)
        del inner[user_key]
        if not inner:
            _remove(key, self.elements, self.element_layer)

    def clear(self, key: bytes) -> None:
        """Remove every entry of a key."""
        self.delete(key, b"")
        gone = self.elements_of(key)
        if gone:
            self.entries -= len(gone)
            self.bytes -= len(gone) * len(key) + sum(map(len, gone)) + sum(map(len, gone.values()))
            _remove(key, self.elements, self.element_layer)

    def sorted_keys(self, version: int) -> list[bytes] | SortedItems:
        """Return all keys in order; sorting again after few changes costs little more than a walk.

        Args:
            version: Version of the key group; the order of the same version is remembered.
        """
        if self._order_version != version:
            points, elements = self._merged_points(), self._merged_elements()
            names = points.names() if isinstance(points, ValueSlots) and not elements else None
            if isinstance(names, np.ndarray):
                self._order = SortedItems(names)
            else:
                present = set(points) | elements.keys()
                order = [key for key in self._order if key in present] if isinstance(self._order, list) else []
                order.extend(present.difference(order))
                order.sort()
                self._order = order
            self._order_version = version
        return self._order

    def keys(self) -> Keys:
        """Return all keys, in no order."""
        points, elements = self._merged_points(), self._merged_elements()
        if elements:
            return list(set(points) | elements.keys())
        return points.names() if isinstance(points, ValueSlots) else list(points)

    def expired_entries(self, keys: Keys, expired: ExpiredValue) -> list[tuple[bytes, bytes]]:
        """Return the (key, user key) of what has expired of some keys."""
        dead = []
        for key, value in zip(names_of(keys), self.get_all(keys), strict=True):
            if value is not None and expired(value):
                dead.append((key, b""))
            dead.extend((key, user_key) for user_key, value in self.elements_of(key).items() if expired(value))
        return dead

    def copy_into(self, other: HeapGroup) -> None:
        """Put all entries into another group, over what it has."""
        points, elements = self._merged_points(), self._merged_elements()
        if isinstance(points, ValueSlots):
            other.put_all(points.names(), points.fixed_values(), points.width)
        elif points:
            other.put_all(list(points), list(points.values()))
        for key, inner in elements.items():
            for user_key, value in inner.items():
                other.put(key, user_key, value)

    def pages(self, state: int, builder: PageBuilder) -> Iterator[pa.RecordBatch]:
        """Give all entries to a page builder, ordered by key, then user key.

        May run in another thread than the table's, once a snapshot shows the group: Arrow sorts and copies, and lets
        other threads run meanwhile.
        """
        points, elements = self._merged_points(), self._merged_elements()
        if not elements:
            if isinstance(points, ValueSlots):
                keys = key_column(points.names())
                values = key_column(points.fixed_values())
            else:
                keys, values = binary_column(list(points)), binary_column(list(points.values()))
            yield from builder.add(state, keys, None, values, pc.array_sort_indices(keys).to_numpy())
            return
        rows: tuple[list[bytes], list[bytes], list[bytes]] = ([], [], [])
        for key in sorted(set(points) | elements.keys()):
            for user_key, value in self.items(key):
                for column, field in zip(rows, (key, user_key, value), strict=True):
                    column.append(field)
        yield from builder.add(state, *map(binary_column, rows))

    def _merged_points(self) -> Points:
        return self._with_layer(self.points.copy(), self.point_layer) if self.point_layer else self.points

    def _with_layer(self, points: Points, layer: Mapping[bytes, bytes | None]) -> Points:
        """Return a base with a layer written into it."""
        if not isinstance(points, ValueSlots) or points.width != self.point_width:
            return _fold(as_dict(points), layer)
        points.pop_all([key for key, value in layer.items() if value is None])
        put = {key: value for key, value in layer.items() if value is not None}
        points.put_all(list(put), fixed_values(list(put.values()), points.width))
        return points

    def _set_width(self, width: int | None) -> None:
        """Record the length of new values; what is not of one length lies in a dictionary."""
        self.point_width = width if self.point_width == -1 else None
        if self.point_layer is None and not self.point_width:
            self.points = as_dict(self.points)

    def _merged_elements(self) -> dict[bytes, dict[bytes, bytes]]:
        return _fold(self.elements.copy(), self.element_layer) if self.element_layer else self.elements

    def _owned_elements(self, key: bytes) -> dict[bytes, bytes]:
        """Return the key's own inner dictionary to write to, made or copied if need be."""
        if self.element_layer is None:
            return self.elements.setdefault(key, {})
        inner = self.element_layer.get(key)
        if inner is None:
            # Absent from the layer: a copy of the base's. None in the layer: deleted, so a new one.
            inner = {} if key in self.element_layer else dict(self.elements.get(key, _NOTHING))
            self.element_layer[key] = inner
        return inner


def _remove(key: bytes, base: MutableMapping[bytes, T], layer: dict[bytes, T | None] | None) -> None:
    if layer is None:
        del base[key]
    elif key in base:
        layer[key] = None
    else:
        del layer[key]


def _fold(base: dict[bytes, T], layer: Mapping[bytes, T | None]) -> dict[bytes, T]:
    """Write a layer into a base, and return it."""
    for key, value in layer.items():
        if value is None:
            del base[key]
        else:
            base[key] = value
    return base
