"""Approximate distinct counts for many keys at once: HyperLogLog, kept sparse.

Flajolet et al. 2007, with Ertl's estimator (2017, arXiv:1702.01284, algorithm 6), which needs neither bias tables nor
a switch between ranges. A sketch is the sorted list of its registers that are not empty, each as one number:
``register << 6 | rank``; two bytes each up to 1,024 registers and four beyond, little-endian. Few values take few
bytes.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pyspark.sql.types import BinaryType, DataType, LongType, StructField, StructType

from dstl.column_buffers import array_of, binary_of, content_of, items_of
from dstl.errors import Invalid
from dstl.state.codec.field_codec import INTEGERS
from dstl.state.codec.key_codec import KeyCodec
from dstl.state.vectorised.aggregate_functions import Accumulator, Columns, without_nulls
from dstl.state.vectorised.key_codes import Groups, group_codes

_U64 = np.uint64
_RANK_BITS = 6  # a rank is at most 61, of a 64-bit hash

Hashes = npt.NDArray[np.uint64]


class ApproxCountDistinct(Accumulator):
    """About how many distinct values a column has; nulls do not count.

    Args:
        of: The column's type: any that could be a grouping key.
        rsd: Relative standard deviation of the estimate. Smaller: closer, and the sketch of a key with many distinct
            values grows with the square (0.05: 1 KB at most, 0.01: 64 KB).

    Raises:
        Invalid: ``rsd`` is not in [0.005, 0.4], or the type has no equality.
    """

    state = (BinaryType(),)
    result = LongType()

    def __init__(self, of: DataType, rsd: float) -> None:
        if not 0.005 <= rsd <= 0.4:
            raise Invalid(f"approx_count_distinct: rsd={rsd} is not in [0.005, 0.4]")
        # Spark's rule for the same argument.
        self._bits = max(4, math.ceil(2 * math.log2(1.106 / rsd)))
        self._entry = np.dtype("<u2" if self._bits + _RANK_BITS <= 16 else "<u4")
        self._schema = StructType([StructField("value", of)])
        self._codec()
        # Equal whole numbers of any width have one hash.
        hashed = "whole numbers" if isinstance(of, INTEGERS) else of.simpleString()
        self.form = f"a sketch of {hashed} with {1 << self._bits} registers"

    def fold(self, prior: Columns, column: pa.Array | None, groups: Groups) -> Columns:
        """Return the sketches with the rows' values added."""
        assert column is not None
        codes, column = without_nulls(groups.codes, column)
        # Each distinct value is hashed once.
        values = group_codes(pa.table({"value": column}), ["value"])
        first = Groups(values).first_rows()
        hashes = hash_values(self._codec().encode_array([column.take(array_of(first))], len(first)))[values]
        registers = (hashes >> _U64(64 - self._bits)).astype(np.int64)
        rest = hashes << _U64(self._bits) | _U64(1 << (self._bits - 1))
        ranks = 64 - _bit_length(rest) + 1
        old, old_groups = self._entries(prior[0])
        entries = np.concatenate((registers << _RANK_BITS | ranks, old))
        return [self._sketches(entries, np.concatenate((codes, old_groups)), groups.count)]

    def merge(self, partial: Columns, groups: Groups) -> Columns:
        """Return the sketches of all values that the partial ones have seen."""
        entries, owners = self._entries(partial[0])
        return [self._sketches(entries, groups.codes[owners], groups.count)]

    def _sketches(self, entries: npt.NDArray[np.int64], owners: npt.NDArray[np.int64], count: int) -> pa.Array:
        """Return each group's sketch: of every register its highest rank."""
        # Ordered by group, register and rank: the last of each register is its maximum.
        ordered = np.sort(owners << (self._bits + _RANK_BITS) | entries)
        is_last = np.ones(len(ordered), np.bool_)
        is_last[:-1] = ordered[1:] >> _RANK_BITS != ordered[:-1] >> _RANK_BITS
        kept = ordered[is_last]
        sizes = np.bincount(kept >> (self._bits + _RANK_BITS), minlength=count)
        data = (kept & ((1 << (self._bits + _RANK_BITS)) - 1)).astype(self._entry)
        return binary_of(data.view(np.uint8), sizes * self._entry.itemsize)

    def finish(self, accumulated: Columns) -> pa.Array:
        """Return each key's estimate."""
        entries, owners = self._entries(accumulated[0])
        count, most = len(accumulated[0]), 64 - self._bits + 1
        ranks = entries & ((1 << _RANK_BITS) - 1)
        histogram = np.bincount(owners * (most + 1) + ranks, minlength=count * (most + 1)).reshape(count, most + 1)
        histogram[:, 0] = (1 << self._bits) - histogram[:, 1:].sum(axis=1)
        return array_of(np.rint(_estimates(histogram, self._bits)).astype(np.int64))

    def _codec(self) -> KeyCodec:
        # Made anew in each task: a codec cannot be pickled.
        return KeyCodec(self._schema, "the column of approx_count_distinct")

    def _entries(self, sketches: pa.Array) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return all entries of all sketches, and whose each is."""
        entries, owners = items_of(sketches, self._entry)
        return entries.astype(np.int64), owners


def hash_values(values: pa.Array) -> Hashes:
    """Return a 64-bit hash of each binary value, stable over versions and machines.

    Eight bytes at a time through the finalizer of splitmix64 (Steele et al. 2014); the length goes in first. It
    need not withstand an adversary.
    """
    data, offsets = content_of(values)
    padded = np.concatenate((data, np.zeros(8, np.uint8)))
    lengths = np.diff(offsets)
    hashes = _mixed(lengths.astype(_U64) * _U64(0x9E3779B97F4A7C15) + _U64(0x9E3779B97F4A7C15))
    rows, at, left = np.arange(len(lengths)), offsets[:-1].copy(), lengths.copy()
    while len(rows := rows[left > 0]):
        at, left = at[left > 0], left[left > 0]
        words = padded[at[:, None] + np.arange(8)].reshape(-1).view("<u8")
        short = left < 8
        if short.any():
            words = np.where(short, words & ((_U64(1) << (np.minimum(left, 7) * 8).astype(_U64)) - _U64(1)), words)
        hashes[rows] = _mixed((hashes[rows] ^ words) * _U64(0x9E3779B97F4A7C15) + _U64(0x632BE59BD9B4E019))
        at, left = at + 8, left - 8
    return hashes


def _mixed(hashes: Hashes) -> Hashes:
    hashes = (hashes ^ (hashes >> _U64(30))) * _U64(0xBF58476D1CE4E5B9)
    hashes = (hashes ^ (hashes >> _U64(27))) * _U64(0x94D049BB133111EB)
    return hashes ^ (hashes >> _U64(31))


def _bit_length(numbers: Hashes) -> npt.NDArray[np.int64]:
    """Return the position of the highest bit, counted from 1."""
    # Without a bit that was right of another one, no number is rounded up to the next power of two.
    return np.frexp((numbers & ~(numbers >> _U64(1))).astype(np.float64))[1].astype(np.int64)


def _estimates(histogram: npt.NDArray[np.int64], bits: int) -> npt.NDArray[np.float64]:
    """Return the estimated cardinalities; ``histogram[i, k]`` registers of sketch ``i`` have rank ``k``."""
    registers = float(1 << bits)
    last = histogram.shape[1] - 1
    z = registers * _tau(1.0 - histogram[:, last] / registers)
    for rank in range(last - 1, 0, -1):
        z = 0.5 * (z + histogram[:, rank])
    z = z + registers * _sigma(histogram[:, 0] / registers)
    with np.errstate(divide="ignore"):
        found: npt.NDArray[np.float64] = registers * registers / (2.0 * math.log(2.0)) / z
    return found


def _sigma(x: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    z, y, x = x.copy(), 1.0, x.copy()
    with np.errstate(over="ignore", invalid="ignore"):
        for _ in range(64):
            x = x * x
            z, before, y = z + x * y, z, 2 * y
            if np.array_equal(z, before):
                break
    z[x == 1.0] = np.inf  # no register is set
    return z


def _tau(x: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    edge = (x == 0.0) | (x == 1.0)
    y, z, x = 1.0, 1.0 - x, x.copy()
    for _ in range(128):
        x = np.sqrt(x)
        y *= 0.5
        before = z
        z = z - (1.0 - x) ** 2 * y
        if np.array_equal(z, before):
            break
    return np.where(edge, 0.0, z / 3.0)
