"""Queries of Spark's own stateful operators, one of each kind.

Rows are ``k`` (a key), ``t`` (a moment) and ``v`` (a long).
"""

import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pyspark import cloudpickle
from pyspark.sql import DataFrame, Row
from pyspark.sql import functions as F
from pyspark.sql.streaming import StatefulProcessor

# Spark's Python workers cannot import this module where only the driver's process has it on its path.
cloudpickle.register_pickle_by_value(sys.modules[__name__])


@dataclass(frozen=True, slots=True)
class StatefulQuery:
    """One query.

    Attributes:
        plan: Makes its result of its input.
        mode: Its output mode.
    """

    plan: Callable[[DataFrame], DataFrame]
    mode: str


class _Total(StatefulProcessor):
    """Sum of each key's numbers, in one value state."""

    def init(self, handle: Any) -> None:
        self.total = handle.getValueState("total", "n long")

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        found = self.total.get()
        total = (found[0] if found else 0) + sum(row.v for row in rows)
        self.total.update((total,))
        yield Row(k=key[0], n=total)

    def close(self) -> None:
        pass


def stateful_queries(
    key: str, *, delay: str, gap: str, joined: str = "a.k = b.k AND a.v = b.v AND a.t = b.t"
) -> Mapping[str, StatefulQuery]:
    """Return the queries by name.

    Args:
        key: SQL type of ``k``.
        delay: Of the watermark, as ``1 minute``.
        gap: Of the session windows.
        joined: Condition of the stream's join with itself, as ``a`` and ``b``.
    """

    def timed(df: DataFrame) -> DataFrame:
        return df.withWatermark("t", delay)

    def join(df: DataFrame) -> DataFrame:
        return timed(df).alias("a").join(timed(df).alias("b"), F.expr(joined)).select("a.k", "a.v")

    def session(df: DataFrame) -> DataFrame:
        return timed(df).groupBy(F.session_window("t", gap), "k").count()

    def tws(df: DataFrame) -> DataFrame:
        return df.groupBy("k").transformWithState(_Total(), f"k {key}, n long", "update", "none")

    return {
        "count": StatefulQuery(lambda df: df.groupBy("k").count(), "update"),
        "session": StatefulQuery(session, "append"),
        "join": StatefulQuery(join, "append"),
        "dedup": StatefulQuery(lambda df: timed(df).dropDuplicates(["k", "v", "t"]), "append"),
        "tws": StatefulQuery(tws, "update"),
    }
