"""Our operators in Spark's plan of a query, and the limits behind them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from pyspark.sql import DataFrame

__all__ = ["PlannedOperator", "mark_of", "planned_operators", "watermark_follows"]

_MARK = "CollectMetrics"
_LIMITS = ("GlobalLimit", "LocalLimit", "Offset", "Tail")
_STATEFUL = frozenset(
    (
        "Aggregate",
        "Deduplicate",
        "DeduplicateWithinWatermark",
        "Distinct",
        "FlatMapGroupsInPandasWithState",
        "FlatMapGroupsWithState",
        "TransformWithState",
        "TransformWithStateInPySpark",
        "UpdateEventTimeWatermarkColumn",
    )
)
"""Spark's operators with one input whose output goes by their watermark."""


@dataclass(frozen=True, slots=True)
class PlannedOperator:
    """One place in a plan that looks like an operator of ours.

    Attributes:
        mark: Number of the operator's row counter, unique in a JVM; a copy of the operator in the same plan has the
            same one.
        limited: A limit stands behind it, which ends its tasks before they are through.
    """

    mark: int
    limited: bool


def mark_of(keyed: DataFrame, uid: str) -> int:
    """Return the mark of the operator whose input, counted by :func:`~dstl.spark.query.placement.keyed_input`, this is.

    Raises:
        LookupError: Its rows are not counted.
    """
    for node, _ in _nodes(keyed._jdf.queryExecution().analyzed()):
        if node.nodeName() == _MARK and node.name() == f"dstl_{uid}":
            return _mark(node)
    raise LookupError(f"the rows of operator {uid!r} are not counted")


def planned_operators(df: DataFrame) -> list[PlannedOperator]:
    """Return the operators in a streaming DataFrame as it was written down; other observed frames may be among them."""
    found = _nodes(df._jdf.queryExecution().analyzed())
    return [PlannedOperator(_mark(node), limited) for node, limited in found if node.nodeName() == _MARK]


def watermark_follows(df: DataFrame) -> Literal["operator", "spark"] | None:
    """Return whose watermark the event time of a stream goes by.

    Returns:
        None where nothing stateful stands behind ``withWatermark``; ``operator`` where an operator of ours does, which
        makes a watermark of its own; ``spark`` where one of Spark's does, or ours behind one of Spark's.
    """
    return _follows(df._jdf.queryExecution().analyzed())


def _follows(node: Any) -> Literal["operator", "spark"] | None:
    while True:
        name = node.nodeName()
        if name in _STATEFUL:
            return "spark" if node.isStreaming() else None
        counted = _counted_input(node) if name.endswith("MapInArrow") else None
        if counted is not None:
            return _follows(counted) or "operator"
        if name == "EventTimeWatermark":
            return None
        streams = [child for child in _children(node) if child.isStreaming()]
        if name == "Join" and len(streams) > 1:
            return "spark"
        if name == "Union" and len(streams) > 1:
            found = [_follows(child) for child in streams]
            # Watermarks of several inputs: ours would go by the one that is furthest, and Spark's waits for the last.
            own = [child for child, whose in zip(streams, found, strict=True) if whose is None]
            if "spark" in found or sum(map(_has_watermark, own)) > 1:
                return "spark"
            return None if own else "operator"
        if len(streams) != 1:
            return None
        node = streams[0]


def _has_watermark(node: Any) -> bool:
    return any(each.nodeName() == "EventTimeWatermark" for each, _ in _nodes(node))


def _children(node: Any) -> Iterator[Any]:
    children = node.children()
    for index in range(children.size()):
        yield children.apply(index)


def _counted_input(node: Any) -> Any:
    """Return the input of an operator of ours; None for another one. It stands first in every union of ours."""
    while node.children().size():
        node = node.children().apply(0)
        if node.nodeName() == _MARK and node.name().startswith("dstl_"):
            return node.children().apply(0)
        if node.nodeName() in _STATEFUL:
            return None
    return None


def _mark(node: Any) -> int:
    # Not the counter's name, which two backends may both have, nor its frame, which two operators may share.
    return int(node.metrics().apply(0).exprId().id())


def _nodes(plan: Any, limited: bool = False) -> Iterator[tuple[Any, bool]]:
    """Yield each node of a JVM plan, and whether a limit is above it; from the top, first children first."""
    yield plan, limited
    below = limited or plan.nodeName() in _LIMITS
    for child in _children(plan):
        yield from _nodes(child, below)
