"""The event times that an operator emits: none of them may be late for the operator that follows."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc

from dstl.errors import Invalid

__all__ = ["check_emitted"]


def check_emitted(batch: pa.RecordBatch, column: str, late_ms: int, operator: str) -> None:
    """Refuse output that what follows would drop: it has the watermark of this operator.

    Args:
        batch: Rows that the operator yields.
        column: Their event time; a null is never late.
        late_ms: Rows at or before it are late, milliseconds since 1970.
        operator: For the message.

    Raises:
        Invalid: A row is late; names its time and what to do.
    """
    times = batch.column(column)
    earliest = pc.min(times.cast(pa.timestamp("us", times.type.tz)).view(pa.int64())).as_py()
    if earliest is not None and earliest <= late_ms * 1000:
        raise Invalid(
            f"operator {operator!r} emits a row whose event time {column!r} is {earliest // 1000} ms since 1970, and "
            f"its watermark has passed {late_ms} already, so what follows would drop the row as late: give it a later "
            "event time (that of the timer, or of the latest row), or leave eventTimeColumnName out"
        )
