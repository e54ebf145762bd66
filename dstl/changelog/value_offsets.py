"""Positions of the values of a binary column in its data buffer.

Arrow's own functions let go of the interpreter for each call, which costs more than these.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa

__all__ = ["common_width", "value_offsets"]

_SCAN = 1 << 15

Offsets = npt.NDArray[np.signedinteger]


def value_offsets(column: pa.Array) -> Offsets:
    """Return the ``len + 1`` offsets of a binary, or large binary, array into its data buffer, as a view."""
    dtype = np.dtype(np.int64 if pa.types.is_large_binary(column.type) else np.int32)
    buffer = column.buffers()[1]
    if buffer is None:
        return np.zeros(1, dtype)
    return np.frombuffer(buffer, dtype, len(column) + 1, column.offset * dtype.itemsize)


def common_width(offsets: Offsets) -> int | None:
    """Return the length of every value; None where they differ or there is none."""
    if len(offsets) < 2:
        return None
    # The whole must have the width of the first, which is quick to refuse; then each must.
    width = int(offsets[1] - offsets[0])
    if int(offsets[-1]) - int(offsets[0]) != width * (len(offsets) - 1):
        return None
    # Piece by piece, so that the differences stay in the cache.
    for at in range(0, len(offsets) - 1, _SCAN):
        if not bool((np.diff(offsets[at : at + _SCAN + 1]) == width).all()):
            return None
    return width
