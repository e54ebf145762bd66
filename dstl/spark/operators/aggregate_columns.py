"""PySpark's own grouping and aggregate columns, read out of the plan that Spark makes of them.

Spark itself analyses ``df.groupBy(...).agg(...)``, which is never run: it resolves names, casts arguments and names the
columns of the result, so those are Spark's own. Its plan is read here, through py4j, and nowhere else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from py4j.java_gateway import get_field  # type: ignore[import-untyped]
from pyspark.errors import PySparkException
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import StructType

from dstl.errors import Invalid, clip
from dstl.spark.operators.input_checks import SESSION_WINDOW, WATERMARK_DELAY
from dstl.state.vectorised.keyed_functions import Aggregate
from dstl.state.vectorised.time_windows import TimeWindows

__all__ = [
    "AnalysedAggregation",
    "GroupingWindow",
    "ReadAggregate",
    "aggregate_columns",
    "analyse",
    "is_plain",
    "moment_of",
]

_FUNCTIONS = {
    "count": "count",
    "sum": "sum",
    "avg": "mean",
    "mean": "mean",
    "min": "min",
    "max": "max",
    "first": "first",
    "first_value": "first",
    "last": "last",
    "last_value": "last",
    "approx_count_distinct": "approx_count_distinct",
}
"""Spark's names of the functions that there are here, and ours."""


@dataclass(frozen=True, slots=True)
class GroupingWindow:
    """The window among the grouping columns, as the user has written it.

    Attributes:
        position: Its place among them.
        time: The event time.
        windows: Of ``window``.
        gap: Of ``session_window``: a duration, or a column of them.
    """

    position: int
    time: Column
    windows: TimeWindows | None = None
    gap: str | Column | None = None


@dataclass(frozen=True, slots=True)
class ReadAggregate:
    """One aggregate column.

    Attributes:
        name: Of the result's column.
        aggregate: What it is, without its column.
        argument: What it aggregates; None for rows.
        shown: The argument as Spark shows it, without numbers that change from run to run.
    """

    name: str
    aggregate: Aggregate
    argument: Column | None
    shown: str


@dataclass(frozen=True, slots=True)
class AnalysedAggregation:
    """A grouped aggregation as Spark understands it.

    Attributes:
        schema: Its result: grouping columns, then aggregates, with Spark's names, types and metadata.
        grouping: The grouping columns; None at the place of the window.
        window: The window, where there is one.
        aggregates: The aggregate columns.
    """

    schema: StructType
    grouping: tuple[Column | None, ...]
    window: GroupingWindow | None
    aggregates: tuple[ReadAggregate, ...]


def analyse(df: DataFrame, cols: Sequence[Any], exprs: Sequence[Column], what: str) -> AnalysedAggregation:
    """Return what ``df.groupBy(*cols).agg(*exprs)`` computes.

    Args:
        df: The input.
        cols: Grouping columns: names, columns or positions.
        exprs: Aggregate columns.
        what: Names the operator, for messages.

    Raises:
        Invalid: Spark does not take it, or it has an aggregate that there is not here; says which.
    """
    for each in (*cols, *exprs):
        if isinstance(each, Column) and not hasattr(each, "_jc"):
            raise Invalid(f"{what}: {each!r} is a column of Spark Connect, which a StateBackend cannot read")
    try:
        native = df.groupBy(*cols).agg(*exprs)
        schema: StructType = native.schema
    except PySparkException as error:
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise Invalid(f"{what}: Spark does not take this aggregation: {clip(reason)}") from None
    execution = native._jdf.queryExecution()
    written, analysed = execution.logical(), execution.analyzed()
    jvm: Any = df.sparkSession._jvm
    to_column = jvm.org.apache.spark.sql.classic.ExpressionUtils.column
    grouped = written.groupingExpressions()
    window: GroupingWindow | None = None
    grouping: list[Column | None] = []
    for at in range(grouped.size()):
        found = _window(grouped.apply(at), at, jvm, what)
        if found is not None and window is not None:
            raise Invalid(f"{what}: two windows among the grouping columns; group by one")
        window = found or window
        grouping.append(None if found else Column(to_column(grouped.apply(at))))
    results = analysed.aggregateExpressions()
    if results.size() != len(grouping) + len(exprs):
        raise Invalid(f"{what}: the grouping columns are not in the result: set spark.sql.retainGroupColumns=true")
    aggregates = [
        _aggregate(results.apply(at), to_column, what) for at in range(len(grouping), len(grouping) + len(exprs))
    ]
    return AnalysedAggregation(schema, tuple(grouping), window, tuple(aggregates))


def _window(written: Any, position: int, jvm: Any, what: str) -> GroupingWindow | None:
    """Return the window that a grouping expression is; None where it is none."""
    call = written
    while _kind(call) in ("Alias", "UnresolvedAlias"):
        call = call.child()
    if _kind(call) != "UnresolvedFunction":
        return None
    name = str(call.nameParts().mkString(".")).lower()
    if name not in ("window", "session_window"):
        return None
    arguments = [call.arguments().apply(at) for at in range(call.arguments().size())]
    to_column = jvm.org.apache.spark.sql.classic.ExpressionUtils.column
    time = Column(to_column(arguments[0]))
    if name == "session_window":
        gap = arguments[1]
        text = _text(gap)
        if text is None:
            return GroupingWindow(position, time, gap=Column(to_column(gap)))
        return GroupingWindow(position, time, gap=text)
    durations = [_text(each) for each in arguments[1:]]
    if not all(durations):
        raise Invalid(f"{what}: the durations of window() are texts such as '5 minutes'")
    size, *rest = [_microseconds(str(each), jvm, what) for each in durations]
    slide, offset = [*rest, *(size, 0)[len(rest) :]]
    return GroupingWindow(position, time, windows=TimeWindows(size, slide, offset))


def _aggregate(result: Any, to_column: Any, what: str) -> ReadAggregate:
    name, call = str(result.name()), result
    while _kind(call) == "Alias":
        call = call.child()
    if _kind(call) != "AggregateExpression":
        raise Invalid(
            f"{what}: column {name!r} is no aggregate but an expression: aggregate under a name with "
            "alias(), and compute with withColumn() behind"
        )
    function = call.aggregateFunction()
    known = str(function.prettyName())
    if call.isDistinct():
        raise Invalid(f"{what}: {name!r} has DISTINCT, which is not kept here; approx_count_distinct() is")
    if call.filter().isDefined():
        raise Invalid(f"{what}: {name!r} has a FILTER: aggregate when(condition, column), which is null elsewhere")
    if known not in _FUNCTIONS:
        raise Invalid(
            f"{what}: the aggregate {known}() of column {name!r} is not kept here; there are "
            f"{', '.join(sorted(_FUNCTIONS))}. Write it as a map_states() function or a StatefulProcessor, or leave "
            "it to Spark's own groupBy().agg()"
        )
    arguments = [function.children().apply(at) for at in range(function.children().size())]
    ours = _FUNCTIONS[known]
    if ours == "count":
        if len(arguments) > 1:
            raise Invalid(f"{what}: {name!r} counts rows by several columns: count when(condition, lit(1)) instead")
        if _kind(arguments[0]) == "Literal" and arguments[0].value() is not None:
            return ReadAggregate(name, Aggregate("count"), None, "")
    aggregate = Aggregate(ours)
    if ours in ("first", "last"):
        aggregate = Aggregate(ours, ignore_nulls=bool(function.ignoreNulls()))
    elif ours == "approx_count_distinct":
        aggregate = Aggregate(ours, rsd=float(function.relativeSD()))
    return ReadAggregate(name, aggregate, Column(to_column(arguments[0])), str(arguments[0].sql()))


def _kind(expression: Any) -> str:
    return str(expression.getClass().getSimpleName())


def _text(expression: Any) -> str | None:
    """Return the text that an expression is; None where it is something else."""
    if _kind(expression) != "Literal" or str(expression.dataType().toString()) != "StringType":
        return None
    return str(expression.value().toString())


def _microseconds(text: str, jvm: Any, what: str) -> int:
    utf8 = jvm.org.apache.spark.unsafe.types.UTF8String.fromString(text)
    try:
        interval = jvm.org.apache.spark.sql.catalyst.util.IntervalUtils.stringToInterval(utf8)
    except Exception as error:
        raise Invalid(f"{what}: {text!r} is no duration: {clip(error)}") from None
    if get_field(interval, "months"):
        raise Invalid(f"{what}: the duration {text!r} has months, which differ in length: give days")
    return int(get_field(interval, "days")) * 86_400_000_000 + int(get_field(interval, "microseconds"))


def moment_of(df: DataFrame, time: Column) -> Column:
    """Return the event time of a window: of a window's window, the last moment of the inner one, as in Spark."""
    kind = df.select(time).schema.fields[0].dataType
    return F.window_time(time) if isinstance(kind, StructType) else time


def is_plain(df: DataFrame, by: Any, mode: str, aggregates: Mapping[str, Any]) -> bool:
    """Return True for groups by names alone, without event time, in output mode update: no plan has to be read."""
    names = by if isinstance(by, (list, tuple)) else [by]
    if mode != "update" or any(isinstance(each, Column) for each in (*names, *aggregates.values())):
        return False
    timed = {
        field.name
        for field in (df.schema.fields if isinstance(df, DataFrame) else ())
        if {WATERMARK_DELAY, SESSION_WINDOW} & (field.metadata or {}).keys()
    }
    return not any(isinstance(each, str) and each in timed for each in names)


def aggregate_columns(aggregates: Mapping[str, Aggregate | Column]) -> list[Column]:
    """Return the aggregates that were named as keyword arguments as PySpark's columns."""
    columns = []
    for name, each in aggregates.items():
        if isinstance(each, Column):
            columns.append(each.alias(name))
            continue
        if not isinstance(each, Aggregate):
            raise Invalid(f"{name}= is {each!r}, not an aggregate of dstl.spark such as count(), nor a column")
        column = F.lit(1) if each.column is None else F.col(f"`{each.column}`")
        if each.function in ("first", "last"):
            made = getattr(F, each.function)(column, each.ignore_nulls)
        elif each.function == "approx_count_distinct":
            made = F.approx_count_distinct(column, each.rsd)
        else:
            made = getattr(F, each.function)(column)
        columns.append(made.alias(name))
    return columns
