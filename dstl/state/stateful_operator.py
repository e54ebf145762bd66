"""The part of an operator that its runner and Spark's plan both need, whatever kind of operator it is."""

from __future__ import annotations

from dataclasses import dataclass

from pyspark.sql.types import StructType

from dstl.state.broadcast_state import BroadcastStream


@dataclass(frozen=True, kw_only=True)
class StatefulOperator:
    """An operator, as its runner has to know it: each kind adds what it does.

    Attributes:
        input_schema: All columns of the input that it needs, but for the helper columns.
        key_schema: The key of its state.
        output_schema: Columns of the output.
        streams: Broadcast streams, whose rows every partition gets.
    """

    input_schema: StructType
    key_schema: StructType
    output_schema: StructType
    streams: tuple[BroadcastStream, ...] = ()
