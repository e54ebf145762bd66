"""Digests of change sets: equal changes have equal digests, in whatever order and parts they come.

A shuffle promises no order of rows, so two attempts at one partition write the same changes in different orders. Each
change has a hash of 64 bits, and the digest is made of their sums, which know no order. Columns are hashed eight bytes
at a time for all changes together. An accident goes unnoticed once in some 2**64; an adversary is not withstood.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from dstl.changelog.value_offsets import value_offsets

__all__ = ["ChangeDigest"]

_U64 = np.uint64
_MASK = (1 << 64) - 1
_FACTOR = _U64(0x9E3779B97F4A7C15)
_OTHER = _U64(0xC2B2AE3D27D4EB4F)
_LOW_BYTES = np.array([(1 << (8 * count)) - 1 for count in range(8)] + [_MASK], _U64)
_ROWS = 1 << 13
"""Changes that are hashed together: what they need beside them stays in the processor's cache."""
_LONG = 1024
"""Values above this length are hashed one by one: eight bytes of a few values at a time would take long."""

_Hashes = npt.NDArray[np.uint64]
_Positions = npt.NDArray[np.int64]


class ChangeDigest:
    """Digest of one change set. Not thread-safe."""

    __slots__ = ("_sums",)

    def __init__(self) -> None:
        self._sums = (0, 0)

    def update(self, changes: pa.RecordBatch) -> None:
        """Add changes: columns of ``CHANGE_SCHEMA``, without nulls."""
        one, other = self._sums
        for at in range(0, changes.num_rows, _ROWS):
            hashes = _hash_rows(changes.slice(at, _ROWS))
            # Of two sums of the same hashes, so that neither a lost nor a repeated change is made up for by chance.
            one += int(hashes.sum())
            hashes ^= _OTHER
            other += int(_mix(hashes).sum())
        self._sums = one & _MASK, other & _MASK

    def digest(self) -> bytes:
        """Return the digest of what was added so far: 16 bytes."""
        return b"".join(number.to_bytes(8, "little") for number in self._sums)


def _hash_rows(changes: pa.RecordBatch) -> _Hashes:
    key_groups, states, ops = (np.asarray(changes.column(name)) for name in ("key_group", "state", "op"))
    hashes = key_groups.astype(_U64)
    hashes <<= _U64(32)
    hashes |= states.astype(np.uint32) << np.uint32(8) | ops
    for name in ("key", "user_key", "value"):
        hashes = _hash_column(hashes, changes.column(name))
    return _mix(hashes)


def _hash_column(hashes: _Hashes, values: pa.Array) -> _Hashes:
    """Return the hashes of rows with one more binary column."""
    offsets = value_offsets(values).astype(np.int64)
    lengths = np.diff(offsets)
    hashes ^= lengths.astype(_U64)
    hashes *= _FACTOR
    least, most = int(lengths.min()), int(lengths.max())
    if not most:
        return hashes
    data = np.frombuffer(values.buffers()[2], np.uint8)[: int(offsets[-1])]
    if least < 8:
        # A short value is read with what follows it.
        data = np.concatenate((data, np.zeros(8, np.uint8)))
    for at in range(0, min(most, _LONG), 8):
        if least == most and least >= 8:
            where = int(offsets[0]) + min(at, most - 8)
            hashes ^= np.ndarray(len(values), "<u8", data, where, (most,))
            _stir(hashes)
            continue
        rows = slice(None) if least > at else np.flatnonzero(lengths > at)
        left = lengths[rows]
        # The last word of a value overlaps the one before.
        words = _words(data)[offsets[:-1][rows] + np.minimum(at, np.maximum(left - 8, 0))]
        if not at and least < 8:
            words &= _LOW_BYTES[np.minimum(left, 8)]
        if least > at:
            hashes ^= words
            _stir(hashes)
        else:
            words ^= hashes[rows]
            hashes[rows] = _stir(words)
    if most > _LONG:
        for row, number in _long(data, offsets, lengths):
            hashes[row] ^= _U64(number)
    return hashes


def _words(data: npt.NDArray[np.uint8]) -> _Hashes:
    """Return the eight bytes that begin at each position."""
    return np.ndarray(max(0, len(data) - 7), "<u8", data, 0, (1,))


def _long(data: npt.NDArray[np.uint8], offsets: _Positions, lengths: _Positions) -> Iterator[tuple[int, int]]:
    for row in np.flatnonzero(lengths > _LONG).tolist():
        whole = hashlib.blake2b(data[offsets[row] : offsets[row + 1]].tobytes(), digest_size=8).digest()
        yield row, int.from_bytes(whole, "little")


def _stir(hashes: _Hashes) -> _Hashes:
    hashes *= _FACTOR
    hashes ^= hashes >> _U64(32)
    return hashes


def _mix(hashes: _Hashes) -> _Hashes:
    """Mix numbers in place, so that each bit depends on all: the finalizer of splitmix64 (Steele et al. 2014)."""
    hashes ^= hashes >> _U64(30)
    hashes *= _U64(0xBF58476D1CE4E5B9)
    hashes ^= hashes >> _U64(27)
    hashes *= _U64(0x94D049BB133111EB)
    hashes ^= hashes >> _U64(31)
    return hashes
