"""Spark's plans of a query, logical and physical: their nodes, and whose watermark an event time goes by."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

from py4j.java_gateway import is_instance_of  # type: ignore[import-untyped]
from pyspark.sql import DataFrame

from dstl.spark.query.ticks import QUIET

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

_SOURCES = frozenset(("StreamingRelation", "StreamingRelationV2", "StreamingExecutionRelation"))


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
        or (node.nodeName() == "Join" and sum(bool(child.isStreaming()) for child in children_of(node)) > 1)
        for node in nodes_of(df._jdf.queryExecution().analyzed())
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
        streams = [child for child in children_of(node) if child.isStreaming()]
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
    return any(each.nodeName() == "EventTimeWatermark" for each in nodes_of(node))


def children_of(node: Any) -> Iterator[Any]:
    """Yield a node's children, of the physical nodes too that hide theirs."""
    name = node.nodeName()
    if name == "InMemoryTableScan":
        yield node.relation().cachedPlan()
    elif name == "AdaptiveSparkPlan":
        yield node.executedPlan()
    elif name.endswith("QueryStage"):
        yield node.plan()
    else:
        children = node.children()
        for index in range(children.size()):
            yield children.apply(index)


def nodes_of(plan: Any) -> Iterator[Any]:
    """Yield each node of a plan, from the top, first children first."""
    yield plan
    for child in children_of(plan):
        yield from nodes_of(child)


def sources_of(plan: Any) -> list[str]:
    """Return the names of the sources of a stream's logical plan, in the order in which Spark keeps their offsets.

    Ours have the names of their offsets.
    """
    names = ((str(node.sourceName()), node) for node in nodes_of(plan) if node.nodeName() in _SOURCES)
    return [str(node.extraOptions().get("name")) if name == QUIET else name for name, node in names]


def counted_operator(node: Any) -> str | None:
    """Return the name of the operator of ours whose input a node counts; None for any other node."""
    if node.nodeName() != "CollectMetrics" or not node.name().startswith("dstl_"):
        return None
    return str(node.name().removeprefix("dstl_"))


def operators_in_front(df: DataFrame, uid: str) -> set[str]:
    """Return the names of the operators of ours whose rows reach an operator with no other one of ours in between."""
    return set(_nearest(df._jdf.queryExecution().analyzed(), uid))


def _nearest(node: Any, uid: str) -> Iterator[str]:
    name = counted_operator(node)
    if name is not None and name != uid:
        yield name
        return
    for child in children_of(node):
        yield from _nearest(child, uid)


def is_stateful(node: Any, gateway: Any) -> bool:
    """Return True for a physical node that is a stateful operator of Spark's own."""
    writer = "org.apache.spark.sql.execution.streaming.operators.stateful.StateStoreWriter"
    return bool(is_instance_of(gateway, node, writer))


def _counted_input(node: Any) -> Any:
    """Return the input of an operator of ours; None for another one. It stands first in every union of ours."""
    while node.children().size():
        node = node.children().apply(0)
        if counted_operator(node) is not None:
            return node.children().apply(0)
        if node.nodeName() in _STATEFUL:
            return None
    return None
