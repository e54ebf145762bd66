"""Sums and means of decimals: exact, and of a type with as many digits as Spark's."""

from __future__ import annotations

import decimal

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.types import DecimalType

from dstl.errors import Invalid

DIGITS = 60
"""Of sums on their way: 38 of a value and 18 of a count of rows fit, and 256 bits hold 76."""


def fitting(numbers: pa.Array, kind: pa.DataType, what: str, ansi: bool) -> pa.Array:
    """Return decimals as a type of fewer digits: what does not fit is null, or with ANSI an error."""
    try:
        return numbers.cast(kind)
    except pa.ArrowInvalid as error:
        if ansi:
            raise too_large(what, kind, error) from None
    limit = pa.scalar(decimal.Decimal(10) ** (kind.precision - kind.scale), numbers.type)
    return pc.if_else(pc.less(pc.abs(numbers), limit), numbers, None).cast(kind)


def too_large(what: str, kind: pa.DataType, error: pa.ArrowInvalid) -> Invalid:
    """Return what is raised for a number that does not fit its type."""
    return Invalid(
        f"{what} does not fit {kind}: add up a wider type (cast to decimal(38, 0) or double, say) under another "
        f"name: {error}"
    )


def divided(sums: pa.Array, counts: pa.Array, kind: DecimalType, ansi: bool) -> pa.Array:
    """Return the quotients, rounded half up in the last digit of ``kind``."""
    # Whole numbers of that digit: decimals lose nothing so, and Arrow's own division cuts digits off.
    whole = _with_scale(sums.cast(pa.decimal256(DIGITS - 18, kind.scale)), 0)
    count = counts.cast(pa.decimal256(20, 0))
    half = pc.if_else(pc.less(whole, pa.scalar(decimal.Decimal(0), whole.type)), pc.negate(count), count)
    found = pc.divide(pc.add(pc.add(whole, whole), half), pc.add(count, count))
    found = _with_scale(found.cast(pa.decimal256(DIGITS, 0), safe=False), kind.scale)
    return fitting(found, pa.decimal128(kind.precision, kind.scale), "a mean", ansi)


def _with_scale(column: pa.Array, scale: int) -> pa.Array:
    """Return the same digits with the point elsewhere."""
    kind = pa.decimal256(column.type.precision, scale)
    return pa.Array.from_buffers(kind, len(column), column.buffers(), column.null_count, column.offset)
