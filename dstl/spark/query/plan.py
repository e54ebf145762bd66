"""Whose watermark an event time goes by, from Spark's plan of a query."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

from pyspark.sql import DataFrame

_MARK = "CollectMetrics"
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


def watermark_follows(df: DataFrame) -> Literal["operator", "spark"] | None:
    """Return whose watermark the event time of a stream goes by.

    Returns:
        None where nothing stateful stands behind ``withWatermark``; ``operator`` where an operator of ours does, which
        makes a watermark of its own; ``spark`` where one of Spark's does, or ours behind one of Spark's.
    """
    return _follows(df._jdf.queryExecution().analyzed())


def has_state_of_spark(df: DataFrame) -> bool:
    """Return True where a stateful operator of Spark's own is in the plan of a stream."""
    return any(
        (node.nodeName() in _STATEFUL and node.isStreaming())
        or (node.nodeName() == "Join" and sum(bool(child.isStreaming()) for child in _children(node)) > 1)
        for node in _nodes(df._jdf.queryExecution().analyzed())
    )


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
    return any(each.nodeName() == "EventTimeWatermark" for each in _nodes(node))


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


def _nodes(plan: Any) -> Iterator[Any]:
    """Yield each node of a JVM plan, from the top, first children first."""
    yield plan
    for child in _children(plan):
        yield from _nodes(child)
