"""Aggregates of many keys at once: they fold rows into the accumulators that state holds, and finish those.

An accumulator is one to three columns of the operator's state. Results are those of Spark's functions of the same name:
integers are summed as ``bigint``, nulls are left out, NaN is larger than any number.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.types import (
    BinaryType,
    BooleanType,
    DataType,
    DateType,
    DecimalType,
    DoubleType,
    FloatType,
    LongType,
    StringType,
    StructField,
    StructType,
)

from dstl.column_buffers import array_of, from_int64, numpy_of, of_kind, to_int64, valid_of
from dstl.errors import Invalid
from dstl.state.codec.field_codec import INTEGERS, MICROSECONDS
from dstl.state.frames.row_writer import arrow_schema
from dstl.state.vectorised.decimals import DIGITS, divided, fitting, too_large
from dstl.state.vectorised.exact_sums import exact_sums
from dstl.state.vectorised.key_codes import Groups

_REAL = (FloatType, DoubleType)
_ORDERED = (
    *INTEGERS,
    *_REAL,
    BooleanType,
    DateType,
    *MICROSECONDS,
    DecimalType,
    StringType,
    BinaryType,
)
_I64 = np.iinfo(np.int64)
_EXACT = 1 << 62  # half of what 64 bits hold: the prior sum has the other half
_WITHOUT_ANSI = "set spark.sql.ansi.enabled=false, with which it is null, or add up a wider type under another name"

Columns = Sequence[pa.Array]


class Accumulator(ABC):
    """One aggregate of one operator.

    Attributes:
        state: Types of the accumulator's columns; all nullable. A key without state has nulls.
        result: Type of the result.
        form: How the state's bytes are made, where its types do not say so: stored ones of another form do not fit.
    """

    state: tuple[DataType, ...]
    result: DataType
    form: str = ""

    @abstractmethod
    def fold(self, prior: Columns, column: pa.Array | None, groups: Groups) -> Columns:
        """Return the accumulators of all groups with the rows added.

        Args:
            prior: Each group's accumulator.
            column: The aggregated column, one value per row; None for ``count()`` of rows.
            groups: Which row belongs to which group.

        Raises:
            Invalid: A result does not fit its type.
        """

    @abstractmethod
    def merge(self, partial: Columns, groups: Groups) -> Columns:
        """Return the accumulators of all groups, each put together of some partial ones.

        Args:
            partial: Accumulators, in the order in which their rows count as having come.
            groups: Which partial accumulator belongs to which group.

        Raises:
            Invalid: A result does not fit its type.
        """

    def finish(self, accumulated: Columns) -> pa.Array:
        """Return each group's result."""
        return accumulated[0]


class Count(Accumulator):
    """Number of rows, or of those whose column is not null."""

    state = (LongType(),)
    result = LongType()

    def fold(self, prior: Columns, column: pa.Array | None, groups: Groups) -> Columns:
        """Return the accumulators with the rows added."""
        codes = groups.codes
        if column is not None and column.null_count:
            codes = codes[valid_of(column)]
        return [array_of(_numbers(prior[0]) + np.bincount(codes, minlength=groups.count))]

    def merge(self, partial: Columns, groups: Groups) -> Columns:
        """Return the sums of the partial counts."""
        counts = np.zeros(groups.count, np.int64)
        np.add.at(counts, groups.codes, _numbers(partial[0]))
        return [array_of(counts)]

    def finish(self, accumulated: Columns) -> pa.Array:
        """Return the results."""
        return array_of(_numbers(accumulated[0]))


class Sum(Accumulator):
    """Sum of a column of integers or doubles; null where all values are.

    Args:
        of: The column's type.
        ansi: A sum above 64 bits is an error. Without, it wraps around, as Spark's does.
    """

    def __init__(self, of: DataType, *, ansi: bool = True) -> None:
        if isinstance(of, INTEGERS):
            self.result = LongType()
        elif isinstance(of, _REAL):
            self.result = DoubleType()
        else:
            raise Invalid(f"sum() takes numbers, not {of.simpleString()}")
        self.state = (self.result,)
        self._kind = arrow_schema(StructType([StructField("sum", self.result)])).field(0).type
        self._wraps = not ansi and isinstance(self.result, LongType)

    def fold(self, prior: Columns, column: pa.Array | None, groups: Groups) -> Columns:
        """Return the accumulators with the rows added."""
        assert column is not None
        partial = _summed(column, groups, self._kind, self._wraps)
        return [_plus(prior[0], partial, self._wraps)]

    def merge(self, partial: Columns, groups: Groups) -> Columns:
        """Return the sums of the partial sums."""
        return [_summed(partial[0], groups, self._kind, self._wraps)]


class DecimalSum(Accumulator):
    """Sum of a column of decimals; null where all values are.

    Args:
        of: The column's type.
        ansi: A sum that does not fit its type is an error. Without, it is null, whatever comes then, as Spark's is.
    """

    def __init__(self, of: DecimalType, *, ansi: bool = True) -> None:
        self.result = DecimalType(min(38, of.precision + 10), of.scale)
        # The flag tells a sum that did not fit from nothing seen.
        self.state = (self.result, BooleanType())
        self._ansi = ansi

    def fold(self, prior: Columns, column: pa.Array | None, groups: Groups) -> Columns:
        """Return the accumulators with the rows added."""
        assert column is not None
        # The prior sums are rows like any other.
        codes = np.concatenate((groups.codes, np.arange(groups.count)))
        flags = pa.concat_arrays([pa.nulls(len(column), pa.bool_()), prior[1]])
        sums = pa.concat_arrays([column.cast(prior[0].type), prior[0]])
        return self.merge([sums, flags], Groups(codes))

    def merge(self, partial: Columns, groups: Groups) -> Columns:
        """Return the sums of the partial sums."""
        lost = np.zeros(groups.count, np.bool_)
        lost[groups.codes[numpy_of(partial[1], False)]] = True
        codes, values = without_nulls(groups.codes, partial[0])
        kind = pa.decimal128(self.result.precision, self.result.scale)
        # Exact in so many digits: what does not fit then is no other number.
        sums = _by_group(values.cast(pa.decimal256(DIGITS, kind.scale)), codes, groups.count, "sum")
        found = fitting(sums, kind, "a sum", self._ansi)
        lost |= numpy_of(pc.and_(sums.is_valid(), found.is_null()))
        return [pc.if_else(array_of(lost), None, found) if lost.any() else found, array_of(lost)]

    def finish(self, accumulated: Columns) -> pa.Array:
        """Return the results.

        Raises:
            Invalid: A sum has not fitted while that was no error.
        """
        sums, lost = accumulated
        if self._ansi and numpy_of(lost, False).any():
            raise Invalid(f"a sum has not fitted its type before: {_WITHOUT_ANSI}")
        return sums


class Mean(Accumulator):
    """Mean of a number column; null where all values are. A double, or of decimals one with four more digits.

    Args:
        of: The column's type.
        ansi: As of :class:`DecimalSum`, of sums and means of decimals.
    """

    def __init__(self, of: DataType, *, ansi: bool = True) -> None:
        self._sum: Sum | DecimalSum
        if isinstance(of, DecimalType):
            self.result = DecimalType(min(38, of.precision + 4), min(38, of.scale + 4))
            self._sum = DecimalSum(of, ansi=ansi)
        elif isinstance(of, (*INTEGERS, *_REAL)):
            self.result = DoubleType()
            self._sum = Sum(DoubleType())
        else:
            raise Invalid(f"mean() takes numbers, not {of.simpleString()}")
        self._ansi = ansi
        self._count = Count()
        self.state = (*self._sum.state, LongType())

    def fold(self, prior: Columns, column: pa.Array | None, groups: Groups) -> Columns:
        """Return the accumulators with the rows added."""
        assert column is not None
        if isinstance(self.result, DoubleType):
            column = column.cast(pa.float64(), safe=False)
        return [*self._sum.fold(prior[:-1], column, groups), *self._count.fold(prior[-1:], column, groups)]

    def merge(self, partial: Columns, groups: Groups) -> Columns:
        """Return the sums of the partial sums and counts."""
        return [*self._sum.merge(partial[:-1], groups), *self._count.merge(partial[-1:], groups)]

    def finish(self, accumulated: Columns) -> pa.Array:
        """Return the results.

        Raises:
            Invalid: A mean of decimals does not fit its type; or as :meth:`DecimalSum.finish`.
        """
        sums = self._sum.finish(accumulated[:-1])
        counts = numpy_of(accumulated[-1], 0)
        count = array_of(counts, counts == 0)
        if isinstance(self.result, DecimalType):
            return divided(sums, count, self.result, self._ansi)
        return pc.divide(sums, count.cast(pa.float64(), safe=False))


class Extreme(Accumulator):
    """Smallest or largest value; null where all are.

    Args:
        of: The column's type.
        largest: Which end.
    """

    def __init__(self, of: DataType, *, largest: bool) -> None:
        self._name = "max" if largest else "min"
        if not isinstance(of, _ORDERED):
            raise Invalid(f"{self._name}() takes a type with an order, not {of.simpleString()}")
        if isinstance(of, StringType) and getattr(of, "collation", "UTF8_BINARY") != "UTF8_BINARY":
            raise Invalid(
                f"{self._name}() takes plain strings, not {of.simpleString()}: their order is not that of bytes"
            )
        self._largest = largest
        self.result = of
        self.state = (of,)

    def fold(self, prior: Columns, column: pa.Array | None, groups: Groups) -> Columns:
        """Return the accumulators with the rows added."""
        assert column is not None
        # The prior values are rows like any other.
        codes = np.concatenate((groups.codes, np.arange(groups.count)))
        codes, values = without_nulls(codes, pa.concat_arrays([column, prior[0]]))
        if pa.types.is_floating(values.type):
            return [self._floats(values, codes, groups.count)]
        kind = values.type
        # These are numbers below, in the same order.
        as_numbers = pa.types.is_integer(kind) or pa.types.is_temporal(kind) or pa.types.is_boolean(kind)
        if as_numbers:
            found = np.full(groups.count, _I64.min if self._largest else _I64.max)
            (np.maximum if self._largest else np.minimum).at(found, codes, to_int64(values))
            return [from_int64(found, _groups_without_rows(codes, groups.count), kind)]
        # Arrow aggregates strings by themselves.
        return [_by_group(values, codes, groups.count, self._name).cast(kind)]

    def merge(self, partial: Columns, groups: Groups) -> Columns:
        """Return the extremes of the partial ones."""
        return self.fold([pa.nulls(groups.count, partial[0].type)], partial[0], groups)

    def _floats(self, values: pa.Array, codes: npt.NDArray[np.int64], count: int) -> pa.Array:
        numbers = numpy_of(values)
        zeros = np.flatnonzero(numbers == 0)
        if len(zeros):
            # Of equal zeros -0.0 counts as the smaller: which one came first must not show.
            wins = np.signbit(numbers[zeros]) != self._largest
            zeros = np.concatenate((zeros[~wins], zeros[wins]))
        if self._largest:
            found = np.full(count, -np.inf, numbers.dtype)
            with np.errstate(invalid="ignore"):
                np.maximum.at(found, codes, numbers)  # a NaN wins
        else:
            found = np.full(count, np.nan, numbers.dtype)
            with np.errstate(invalid="ignore"):
                np.fmin.at(found, codes, numbers)  # a number wins over a NaN
        if len(zeros):
            chosen = zeros[found[codes[zeros]] == 0]
            found[codes[chosen]] = numbers[chosen]
        found[np.isnan(found)] = np.nan
        return array_of(found, _groups_without_rows(codes, count))


class First(Accumulator):
    """The value of the first row, which may be null; or the first value that is not.

    Args:
        of: The column's type.
        ignore_nulls: Leave rows out whose value is null.
    """

    def __init__(self, of: DataType, *, ignore_nulls: bool) -> None:
        self.result = of
        # The flag tells a null that was seen from nothing seen.
        self.state = (of, BooleanType())
        self._ignore_nulls = ignore_nulls

    def fold(self, prior: Columns, column: pa.Array | None, groups: Groups) -> Columns:
        """Return the accumulators with the rows added."""
        assert column is not None
        taken, seen = _picked(column, groups.first_rows(self._rows(column)))
        before = array_of(numpy_of(prior[1], False))
        return [pc.if_else(before, prior[0], taken), pc.or_(before, seen)]

    def merge(self, partial: Columns, groups: Groups) -> Columns:
        """Return the first of the partial values that were seen."""
        return _picked(partial[0], groups.first_rows(_seen(partial)))

    def _rows(self, column: pa.Array) -> npt.NDArray[np.int64] | None:
        if not self._ignore_nulls or not column.null_count:
            return None
        return np.flatnonzero(valid_of(column))


class Last(First):
    """The value of the last row, or the last value that is not null."""

    def fold(self, prior: Columns, column: pa.Array | None, groups: Groups) -> Columns:
        """Return the accumulators with the rows added."""
        assert column is not None
        taken, seen = _picked(column, groups.last_rows(self._rows(column)))
        return [pc.if_else(seen, taken, prior[0]), pc.or_(array_of(numpy_of(prior[1], False)), seen)]

    def merge(self, partial: Columns, groups: Groups) -> Columns:
        """Return the last of the partial values that were seen."""
        return _picked(partial[0], groups.last_rows(_seen(partial)))


def _seen(partial: Columns) -> npt.NDArray[np.int64]:
    return np.flatnonzero(numpy_of(partial[1], False))


def _picked(column: pa.Array, rows: npt.NDArray[np.int64]) -> Columns:
    return [column.take(array_of(rows, rows < 0)), array_of(rows >= 0)]


def _numbers(column: pa.Array) -> npt.NDArray[np.int64]:
    found: npt.NDArray[np.int64] = numpy_of(column, 0)
    return found


def without_nulls(codes: npt.NDArray[np.int64], column: pa.Array) -> tuple[npt.NDArray[np.int64], pa.Array]:
    """Return the groups of the rows that have a value, and those values."""
    if not column.null_count:
        return codes, column
    valid = column.is_valid()
    return codes[numpy_of(valid)], column.filter(valid)


def _groups_without_rows(codes: npt.NDArray[np.int64], count: int) -> npt.NDArray[np.bool_]:
    missing = np.ones(count, np.bool_)
    missing[codes] = False
    return missing


def _by_group(values: pa.Array, codes: npt.NDArray[np.int64], count: int, function: str) -> pa.Array:
    """Return what a function of Arrow's makes of each group's values, null where a group has none."""
    table = pa.table({"group": codes, "value": values}).group_by("group", use_threads=False)
    found = table.aggregate([("value", function)]).combine_chunks()
    rows = np.full(count, -1, np.int64)
    rows[numpy_of(found.column("group").combine_chunks())] = np.arange(found.num_rows)
    column = found.column(f"value_{function}").take(array_of(rows, rows < 0))
    return column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column


def _summed(column: pa.Array, groups: Groups, kind: pa.DataType, wraps: bool) -> pa.Array:
    """Return each group's sum, null where it has no value."""
    codes, column = without_nulls(groups.codes, column)
    missing = _groups_without_rows(codes, groups.count)
    mask = missing if missing.any() else None
    if pa.types.is_floating(kind):
        numbers = numpy_of(of_kind(column, pa.float64()))
        return array_of(exact_sums(numbers, codes, groups.count), mask)
    if pa.types.is_integer(kind):
        whole = numpy_of(of_kind(column, pa.int64()))
        if wraps or not len(whole) or max(int(whole.max()), -int(whole.min())) * len(whole) < _EXACT:
            sums = np.zeros(groups.count, np.int64)
            np.add.at(sums, codes, whole)
            return array_of(sums, mask)
    # Exact in so many digits: what does not fit then is an error, not another number.
    try:
        return _by_group(column.cast(pa.decimal256(DIGITS, 0)), codes, groups.count, "sum").cast(kind)
    except pa.ArrowInvalid as error:
        raise too_large("a sum", kind, error) from None


def _plus(prior: pa.Array, partial: pa.Array, wraps: bool) -> pa.Array:
    """Return the sums of both; a null on one side leaves the other."""
    try:
        both = (pc.add if wraps else pc.add_checked)(prior, partial)
    except pa.ArrowInvalid as error:
        raise too_large("a sum", prior.type, error) from None
    return pc.coalesce(both, prior, partial) if both.null_count else both
