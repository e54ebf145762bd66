"""Aggregates whose accumulator is more than a number: moments, the row of an extreme, and collected values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.types import ArrayType, DataType, DoubleType, LongType, StructField, StructType

from dstl.column_buffers import array_of, numpy_of, valid_of
from dstl.state.codec.key_codec import refuse_unequal
from dstl.state.frames.row_writer import arrow_schema_of
from dstl.state.vectorised.aggregate_functions import Accumulator, Columns, Extreme
from dstl.state.vectorised.exact_sums import plain_sums
from dstl.state.vectorised.key_codes import Codes, Groups, group_codes


class Variance(Accumulator):
    """Variance or standard deviation of doubles; null without values, and of a sample of one.

    Kept as Spark keeps it: the sum of squared differences from the mean, the mean, and the count.

    Args:
        sample: Of a sample; otherwise of the population.
        root: The standard deviation.
    """

    state = (DoubleType(), DoubleType(), LongType())
    result = DoubleType()

    def __init__(self, *, sample: bool, root: bool) -> None:
        self._fewest = 2 if sample else 1
        self._root = root

    def fold(self, prior: Columns, column: pa.Array | None, groups: Groups) -> Columns:
        """Return the accumulators with the rows added."""
        assert column is not None
        valid = valid_of(column)
        values, codes = numpy_of(column.filter(array_of(valid))), groups.codes[valid]
        count = np.bincount(codes, minlength=groups.count)
        with np.errstate(over="ignore", invalid="ignore"):
            mean = _means(values, np.ones(len(values)), codes, count)
            squares = plain_sums((values - mean[codes]) ** 2, codes, groups.count)
        rows = [array_of(squares), array_of(mean), array_of(count)]
        both = [pa.concat_arrays(pair) for pair in zip(prior, rows, strict=True)]
        return self.merge(both, Groups(np.tile(np.arange(groups.count), 2)))

    def merge(self, partial: Columns, groups: Groups) -> Columns:
        """Return the moments of all rows, of those of some of them."""
        squares, means, counts = (numpy_of(each, 0) for each in partial)
        codes, total = groups.codes, plain_sums(counts, groups.codes, groups.count)
        with np.errstate(over="ignore", invalid="ignore"):
            mean = _means(means, counts, codes, total)
            # Nothing has no mean, and is no square away from one whose square overflows.
            spread = squares + np.where(counts > 0, counts * (means - mean[codes]) ** 2, 0)
        return [array_of(plain_sums(spread, codes, groups.count)), array_of(mean), array_of(total.astype(np.int64))]

    def finish(self, accumulated: Columns) -> pa.Array:
        """Return the results."""
        squares, _, count = accumulated
        counts = numpy_of(count, 0)
        count = array_of(counts, counts < self._fewest)
        found = pc.divide(squares, pc.subtract(count, self._fewest - 1).cast(pa.float64(), safe=False))
        return pc.sqrt(found) if self._root else found


def _means(
    means: npt.NDArray[np.float64], counts: npt.NDArray[Any], codes: Codes, total: npt.NDArray[Any]
) -> npt.NDArray[np.float64]:
    """Return each group's mean, of means of some of its numbers."""
    found: npt.NDArray[np.float64] = plain_sums(means * counts, codes, len(total)) / np.maximum(total, 1)
    if not np.isinf(found).any():
        return found
    # The sum has overflowed, which the mean does not. Equal numbers, and no others so large, have a mean exactly.
    one = np.zeros(len(total))
    one[codes[counts > 0]] = means[counts > 0]
    away = (means - one[codes]) * (counts / np.maximum(total, 1)[codes])
    return np.where(np.isinf(found), one + plain_sums(away, codes, len(total)), found)


class ExtremeBy(Accumulator):
    """The value of the row whose other column is the smallest or largest; of equal ones the last row's.

    Args:
        of: A struct of the value and what is compared.
        largest: Which end.
    """

    def __init__(self, of: StructType, *, largest: bool) -> None:
        value, order = (field.dataType for field in of.fields)
        self.result = value
        self.state = (value, order)
        self._extreme = Extreme(order, largest=largest)

    def fold(self, prior: Columns, column: pa.Array | None, groups: Groups) -> Columns:
        """Return the accumulators with the rows added."""
        assert column is not None
        both = [pa.concat_arrays([held, new]) for held, new in zip(prior, column.flatten(), strict=True)]
        return self.merge(both, Groups(np.concatenate((np.arange(groups.count), groups.codes))))

    def merge(self, partial: Columns, groups: Groups) -> Columns:
        """Return the value and the extreme of the partial ones."""
        values, orders = partial
        (extreme,) = self._extreme.merge([orders], groups)
        wanted = extreme.take(array_of(groups.codes))
        equal = pc.equal(orders, wanted)
        if pa.types.is_floating(orders.type):
            equal = pc.or_(equal, pc.and_(pc.is_nan(orders), pc.is_nan(wanted)))
        found = groups.last_rows(np.flatnonzero(numpy_of(equal, False)))
        rows = array_of(found, found < 0)
        return [values.take(rows), orders.take(rows)]


class Collected(Accumulator):
    """All values that are not null, in the order in which they came, or each of them once; empty without any.

    A group's values are one value of its state, and written again when one is added.

    Args:
        of: The column's type.
        once: Each value once: of equal ones the first.
    """

    def __init__(self, of: DataType, *, once: bool) -> None:
        self.result = ArrayType(of, containsNull=False)
        self.state = (self.result,)
        self._once = once
        self._kind = arrow_schema_of(StructType([StructField("values", self.result)]), "the list").field(0).type

    def fold(self, prior: Columns, column: pa.Array | None, groups: Groups) -> Columns:
        """Return the accumulators with the rows added."""
        assert column is not None
        valid = column.is_valid()
        codes = groups.codes[numpy_of(valid)]
        kept, kind = column.filter(valid), self._kind.value_type
        # Arrow casts no null struct with a NOT NULL field within a list, not even to the type that it has.
        values = [prior[0].flatten(), kept if kept.type == kind else kept.cast(kind)]
        return [self._lists(values, np.concatenate((_owners(prior[0]), codes)), groups.count)]

    def merge(self, partial: Columns, groups: Groups) -> Columns:
        """Return the partial lists, one behind the other."""
        return [self._lists([partial[0].flatten()], np.repeat(groups.codes, _lengths(partial[0])), groups.count)]

    def finish(self, accumulated: Columns) -> pa.Array:
        """Return the results."""
        return self._lists([accumulated[0].flatten()], _owners(accumulated[0]), len(accumulated[0]))

    def _lists(self, values: Sequence[pa.Array], owners: Codes, count: int) -> pa.Array:
        order = np.argsort(owners, kind="stable")
        owners, whole = owners[order], pa.concat_arrays(values).take(array_of(order))
        if self._once:
            first = Groups(group_codes(pa.table({"owner": owners, "value": whole}), ["owner", "value"])).first_rows()
            owners, whole = owners[first], whole.take(array_of(first))
        offsets = np.concatenate(([0], np.cumsum(np.bincount(owners, minlength=count)))).astype(np.int32)
        return pa.ListArray.from_arrays(array_of(offsets), whole, type=self._kind)


class CountDistinct(Collected):
    """The number of values that differ, exactly: all of them are kept, each once."""

    def __init__(self, of: DataType) -> None:
        refuse_unequal(of, "the column of count_distinct")
        super().__init__(of, once=True)
        self.result = LongType()

    def finish(self, accumulated: Columns) -> pa.Array:
        """Return the results."""
        return array_of(_lengths(accumulated[0]))


def _lengths(lists: pa.Array) -> npt.NDArray[np.int64]:
    found: npt.NDArray[np.int64] = numpy_of(pc.list_value_length(lists), 0).astype(np.int64)
    return found


def _owners(lists: pa.Array) -> Codes:
    return np.repeat(np.arange(len(lists)), _lengths(lists))
