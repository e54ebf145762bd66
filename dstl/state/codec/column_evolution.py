"""Columns of an older schema version's values as the newest has them: ``schema_evolution`` a whole column at a time."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
from pyspark.sql.types import BinaryType, DataType, DoubleType, FloatType, StringType

from dstl.state.codec.type_groups import WHOLE
from dstl.state.codec.wire_column import from_int64, to_int64

__all__ = ["widened"]


def widened(column: pa.Array, old: DataType, new: DataType, arrow_type: pa.DataType) -> pa.Array:
    """Return a column of one type without fields or elements as the type that it has become.

    Args:
        column: Of ``old``.
        old: The type under which it was written.
        new: The type under which it is read, which the other may become.
        arrow_type: In which Arrow carries ``new``.
    """
    if isinstance(old, WHOLE) and isinstance(new, (*WHOLE, FloatType, DoubleType)):
        nulls = column.is_null().to_numpy(zero_copy_only=False)
        numbers = to_int64(column)
        if isinstance(new, WHOLE):
            return from_int64(numbers, nulls, arrow_type)
        # By numpy: Arrow's cast to a float refuses or rounds twice.
        kind = np.float32 if isinstance(new, FloatType) else np.float64
        return pa.array(numbers.astype(kind), arrow_type, mask=nulls)
    if isinstance(old, BinaryType) and isinstance(new, StringType):
        try:
            return column.cast(arrow_type)
        except pa.ArrowInvalid:
            found = [None if one is None else one.decode(errors="replace") for one in column.to_pylist()]
            return pa.array(found, arrow_type)
    return column.cast(arrow_type)
