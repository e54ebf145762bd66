"""Many keys of one length, side by side in arrays: see :class:`KeyColumn`."""

from __future__ import annotations

import secrets
from array import array
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from materializer.tables.key_places import NO_KEY, ONE_BY_ONE, FixedItems, Keys, Places, names_of, side_by_side

_SHORT = 64  # new keys: so few are put into chains one by one sooner
_BUCKETS = 2  # a key, at least: so most new keys meet an empty one
_LONG_CHAIN = 16  # twice what is the longest of a million keys by chance
_DRAWS = 4  # of factors, until chains are short
_HASH_BITS = (1 << 64) - 1  # of a product, as arrays of numpy have it


class _Word(NamedTuple):
    """A number in keys of one length, and two random odd factors to hash it by.

    Attributes:
        place: Where it is in an item of an array; None: it is all of it.
        part: Where it is in bytes.
        first: A factor.
        second: Another one.
    """

    place: np.dtype[Any] | None
    part: slice
    first: int
    second: int

    @classmethod
    def all_of(cls, width: int) -> list[_Word]:
        """Return the numbers of keys of this length. The last may begin inside the one before it: no key is padded."""
        size = next(size for size in (8, 4, 2, 1) if size <= width)
        words: list[_Word] = []
        for start in (*range(0, width - size, size), width - size):
            place = np.dtype({"names": ["word"], "formats": [f"<u{size}"], "offsets": [start], "itemsize": width})
            factors = secrets.randbits(64) | 1, secrets.randbits(64) | 1
            words.append(cls(None if width == 8 else place, slice(start, start + size), *factors))
        return words

    def product(self, cells: npt.NDArray[Any]) -> npt.NDArray[np.uint64]:
        """Return the number of each key, times the first factor."""
        numbers = cells if self.place is None else cells.view(self.place)["word"].astype(np.uint64)
        product: npt.NDArray[np.uint64] = numbers * np.uint64(self.first)
        return product

    def mix(self, product: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
        """Let the highest bits of products count in the lower ones, and multiply again; in place."""
        product ^= product >> np.uint64(32)
        product *= np.uint64(self.second)
        return product


class KeyColumn:
    """Keys of one length: see :class:`KeyPlaces`.

    A bucket has the first place of its chain, and each place the next one. Most chains have one key, for there are
    twice as many buckets as keys at least. Nobody can choose keys that meet in one chain: they are hashed by random
    numbers.

    Args:
        width: Length of every key, above 0.

    Attributes:
        width: The same.
    """

    __slots__ = ("_buckets", "_cell", "_chain", "_free", "_keys", "_shift", "_views", "_words", "used", "width")

    def __init__(self, width: int) -> None:
        self.used, self.width = 0, width
        # Numbers are compared faster than bytes.
        self._cell: np.dtype[Any] = np.dtype("<u8" if width == 8 else f"V{width}")
        self._words = _Word.all_of(width)
        self._free = array("i")
        self._keys, self._chain = np.zeros(1, self._cell), np.zeros(1, np.int32)
        self._make_buckets(2)

    def __len__(self) -> int:
        return self.used - len(self._free)

    def names(self) -> FixedItems:
        """Return all keys."""
        names: FixedItems = self._keys[self.all()].view(f"V{self.width}")
        return names

    def all(self) -> Places:
        """Return the places of all keys."""
        if not self._free:
            return np.arange(self.used, dtype=np.int32)
        there = np.ones(self.used, np.bool_)
        there[np.frombuffer(self._free, np.int32)] = False
        return there.nonzero()[0].astype(np.int32)

    def takes(self, keys: Keys) -> bool:
        """Return whether keys have the length of these."""
        if isinstance(keys, np.ndarray):
            return keys.dtype.itemsize == self.width
        return set(map(len, keys)) <= {self.width}

    def get(self, key: bytes) -> int:
        """Return a key's place."""
        width = self.width
        if len(key) != width:
            return NO_KEY
        buckets, chain, keys = self._views
        place: int = buckets[self._bucket_of(key)]
        while place >= 0 and keys[place * width : (place + 1) * width] != key:
            place = chain[place]
        return place

    def find(self, keys: Keys) -> Places:
        """Return the place of each key."""
        if len(keys) <= ONE_BY_ONE:
            return np.fromiter(map(self.get, names_of(keys)), np.int32, len(keys))
        cells = self._cells(keys)
        if cells is not None:
            return self._find(cells, self._hashed(cells))
        found = np.full(len(keys), NO_KEY, np.int32)
        if not isinstance(keys, np.ndarray):
            alike = [row for row, key in enumerate(keys) if len(key) == self.width]
            if alike:
                found[alike] = self.find([keys[row] for row in alike])
        return found

    def put(self, keys: Keys) -> tuple[Places, int]:
        """Give each key, which must be one that this :meth:`takes`, a place."""
        before = len(self)
        if len(keys) <= ONE_BY_ONE:
            found = np.fromiter(map(self._put_one, names_of(keys)), np.int32, len(keys))
            return found, (len(self) - before) * self.width
        cells = self._cells(keys)
        assert cells is not None, f"a key of another length among keys of {self.width}"
        hashed = self._hashed(cells)
        found = self._find(cells, hashed)
        missing = (found < 0).nonzero()[0]
        if len(missing):
            new = cells[missing]
            if _BUCKETS * (before + len(new)) > len(self._buckets):
                self._make_buckets(before + len(new))
                hashed = self._hashed(cells)
            found[missing] = self._link(self._take(len(new)), new, hashed[missing])
        return found, (len(self) - before) * self.width

    def pop(self, keys: Keys) -> int:
        """Take keys out."""
        if len(keys) <= ONE_BY_ONE:
            names = {place: name for name in names_of(keys) if (place := self.get(name)) >= 0}
            self._unlink_each({place: self._bucket_of(name) for place, name in names.items()})
            self._free.extend(names)
            return len(names) * self.width
        cells = self._cells(keys)
        if cells is None:
            return self.pop(alike) if (alike := [key for key in keys if len(key) == self.width]) else 0
        hashed = self._hashed(cells)
        found = self._find(cells, hashed)
        there = (found >= 0).nonzero()[0]
        if len(there) < len(found):
            found, hashed = found[there], hashed[there]
        self._unlink(found, hashed)
        places = dict.fromkeys(found.tolist())
        self._free.extend(places)
        return len(places) * self.width

    def copy(self) -> KeyColumn:
        """Return another one of the same content."""
        twin = KeyColumn(self.width)
        twin.used, twin._free, twin._shift, twin._words = self.used, self._free[:], self._shift, self._words
        twin._buckets, twin._chain, twin._keys = self._buckets.copy(), self._chain.copy(), self._keys.copy()
        twin._view()
        return twin

    def _cells(self, keys: Keys) -> npt.NDArray[Any] | None:
        items = side_by_side(keys)
        return None if items is None or items.dtype.itemsize != self.width else items.view(self._cell)

    def _hashed(self, cells: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
        """Return the bucket of each key.

        The highest bits of a product with a random odd number are spread evenly. A sum of products would not be where
        keys differ in the highest bits of their numbers, so those are mixed with the lower ones before.
        """
        first, *more = self._words
        hashed = first.product(cells)
        if more:
            hashed = first.mix(hashed)
            for word in more:
                hashed += word.mix(word.product(cells))
        hashed >>= np.uint64(self._shift)
        buckets: npt.NDArray[np.int64] = hashed.view(np.int64)
        return buckets

    def _bucket_of(self, key: bytes) -> int:
        words = self._words
        if len(words) == 1:
            _, part, factor, _ = words[0]
            return (int.from_bytes(key[part], "little") * factor & _HASH_BITS) >> self._shift
        hashed = 0
        for _, part, factor, second in words:
            product = int.from_bytes(key[part], "little") * factor & _HASH_BITS
            hashed += (product ^ product >> 32) * second
        return (hashed & _HASH_BITS) >> self._shift

    def _find(self, cells: npt.NDArray[Any], hashed: npt.NDArray[np.int64]) -> npt.NDArray[np.int32]:
        found = self._buckets.take(hashed)
        # Behind the end of a chain some key is compared that does not matter.
        others = ((self._keys.take(found) != cells) & (found >= 0)).nonzero()[0]
        while len(others) > ONE_BY_ONE:
            places = self._chain.take(found.take(others))
            found[others] = places
            others = others[(self._keys.take(places) != cells.take(others)) & (places >= 0)]
        if len(others):
            _, chain, keys = self._views
            width, names = self.width, cells.take(others).view(f"V{self.width}").tolist()
            for row, place, name in zip(others.tolist(), found.take(others).tolist(), names, strict=True):
                place = chain[place]
                while place >= 0 and keys[place * width : (place + 1) * width] != name:
                    place = chain[place]
                found[row] = place
        return found

    def _link(
        self, places: npt.NDArray[np.int32], cells: npt.NDArray[Any], hashed: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.int32]:
        """Put keys that have no place yet in front of their chains, and into new places.

        Args:
            places: A new place for each.
            cells: The keys; one may come twice.
            hashed: Their buckets.

        Returns:
            The place of each key: of a repeated one the other's, and its own is free again.
        """
        self._keys[places] = cells
        if len(places) <= _SHORT and len(set(cells.tolist())) == len(places):
            buckets, chain, _ = self._views
            for place, bucket in zip(places.tolist(), hashed.tolist(), strict=True):
                chain[place], buckets[bucket] = buckets[bucket], place
            return places
        rows = np.arange(len(places))
        while len(rows):
            mine, chains = places[rows], hashed[rows]
            self._chain[mine] = self._buckets[chains]
            self._buckets[chains] = mine  # of several in one chain the last one stays, and the others try again
            first = self._buckets[chains]
            lost = (first != mine).nonzero()[0]
            same = self._keys[first[lost]] == cells[rows[lost]]
            if same.any():
                repeated = lost[same]
                places[rows[repeated]] = first[repeated]
                self._free.frombytes(mine[repeated].tobytes())
                lost = lost[~same]
            rows = rows[lost]
        return places

    def _unlink(self, places: npt.NDArray[np.int32], hashed: npt.NDArray[np.int64]) -> None:
        """Take places, of which one may be named twice, out of the chains of these buckets."""
        first = self._buckets.take(hashed) == places
        self._buckets[hashed[first]] = self._chain.take(places[first])
        behind = (~first).nonzero()[0]
        self._unlink_each(dict(zip(places[behind].tolist(), hashed[behind].tolist(), strict=True)))

    def _unlink_each(self, places: dict[int, int]) -> None:
        buckets, chain, _ = self._views
        for place, bucket in places.items():
            at = buckets[bucket]
            if at == place:
                buckets[bucket] = chain[place]
                continue
            while chain[at] != place:
                at = chain[at]
            chain[at] = chain[place]

    def _put_one(self, key: bytes) -> int:
        place = self.get(key)
        if place >= 0:
            return place
        if _BUCKETS * len(self) >= len(self._buckets):
            self._make_buckets(len(self) + 1)
        place = self._free.pop() if self._free else int(self._take(1)[0])
        bucket, (buckets, chain, keys) = self._bucket_of(key), self._views
        keys[place * self.width : (place + 1) * self.width] = key
        chain[place], buckets[bucket] = buckets[bucket], place
        return place

    def _take(self, count: int) -> npt.NDArray[np.int32]:
        """Return so many places that no key has."""
        start, reused = self.used, min(count, len(self._free))
        self.used += count - reused
        places = np.arange(start - reused, self.used, dtype=np.int32)
        if reused:
            places[:reused] = self._free[-reused:]
            del self._free[-reused:]
        if self.used > len(self._keys):
            self._keys, self._chain = grown(self._keys, start, self.used), grown(self._chain, start, self.used)
            self._view()
        return places

    def _make_buckets(self, count: int) -> None:
        """Let there be the buckets that so many keys need, and link all keys anew."""
        bits = (_BUCKETS * count - 1).bit_length()
        places = self.all()
        cells = self._keys[places]
        for draw in range(_DRAWS):
            if draw:  # before they are hashed: the last draw stays, whatever chains it makes
                self._words = _Word.all_of(self.width)
            self._buckets, self._shift = np.full(1 << bits, NO_KEY, np.int32), 64 - bits
            self._view()
            hashed = self._hashed(cells)
            if not len(hashed) or np.bincount(hashed).max() <= _LONG_CHAIN:
                break
        self._link(places, cells, hashed)

    def _view(self) -> None:
        # A number out of a view of memory takes a third of the time of one out of an array.
        self._views = self._buckets.data, self._chain.data, self._keys.view(np.uint8).data


def grown(items: npt.NDArray[Any], held: int, count: int, part: int = 4) -> npt.NDArray[Any]:
    """Return another array with the first items of this one, and room for so many, or for a part (a fourth) more."""
    more = np.zeros(max(count, len(items) + len(items) // part), items.dtype)
    more[:held] = items[:held]
    return more
