"""PySpark's own grouping and aggregate columns, read out of the plan that Spark makes of them.

Spark itself analyses ``df.groupBy(...).agg(...)``, which is never run: it resolves names, casts arguments and names the
columns of the result, so those are Spark's own. Its plan is read here, through py4j, and nowhere else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import and_
from typing import Any

from py4j.java_gateway import get_field  # type: ignore[import-untyped]
from pyspark.errors import PySparkException
from pyspark.sql import Column, DataFrame, GroupedData
from pyspark.sql import functions as F
from pyspark.sql.types import StructType

from dstl.errors import Invalid, clip
from dstl.state.vectorised.aggregation import FUNCTIONS, Aggregate
from dstl.state.vectorised.time_windows import TimeWindows


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
        aggregate: What it is, without its column.
        argument: What it aggregates; None for rows.
        shown: The argument as Spark shows it, without numbers that change from run to run.
    """

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


def analyse(
    df: DataFrame, cols: Sequence[Any], aggregate: Callable[[GroupedData], DataFrame], what: str
) -> AnalysedAggregation:
    """Return what ``aggregate(df.groupBy(*cols))`` computes.

    Args:
        df: The input.
        cols: Grouping columns: names, columns or positions.
        aggregate: Calls PySpark's own ``agg``, ``count``, ``sum``, ...
        what: Names the operator, for messages.

    Raises:
        Invalid: Spark does not take it, or it has an aggregate that there is not here; says which.
    """
    check_classic(cols, what)
    try:
        native = aggregate(df.groupBy(*cols))
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
    conf = df.sparkSession.conf
    if conf.get("spark.sql.retainGroupColumns") != "true":
        raise Invalid(f"{what}: the grouping columns are not in the result: set spark.sql.retainGroupColumns=true")
    ansi = conf.get("spark.sql.ansi.enabled") == "true"
    aggregates = [_aggregate(results.apply(at), to_column, ansi, what) for at in range(len(grouping), results.size())]
    return AnalysedAggregation(schema, tuple(grouping), window, tuple(aggregates))


def check_classic(columns: Iterable[Any], what: str) -> None:
    """Refuse columns of Spark Connect, whose plan is not to be read here.

    Args:
        columns: Columns, or anything else.
        what: Names the operator, for the message.

    Raises:
        Invalid: One of them is one.
    """
    for each in columns:
        if isinstance(each, Column) and not hasattr(each, "_jc"):
            raise Invalid(f"{what}: {each!r} is a column of Spark Connect, which a StateBackend cannot read")


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


def _aggregate(result: Any, to_column: Any, ansi: bool, what: str) -> ReadAggregate:
    name, call = str(result.name()), result
    while _kind(call) == "Alias":
        call = call.child()
    if _kind(call) != "AggregateExpression":
        raise Invalid(
            f"{what}: column {name!r} is not an aggregate but an expression: aggregate under a name with "
            "alias(), and compute with withColumn() behind"
        )
    function = call.aggregateFunction()
    known = str(function.prettyName())
    if call.isDistinct():
        if known != "count":
            raise Invalid(f"{what}: {name!r} has DISTINCT, which count() alone may have here")
        known = "count_distinct"
    if call.filter().isDefined():
        raise Invalid(f"{what}: {name!r} has a FILTER: aggregate when(condition, column), which is null elsewhere")
    if known not in FUNCTIONS:
        raise Invalid(
            f"{what}: the aggregate {known}() of column {name!r} is not kept here; there are "
            f"{', '.join(sorted(FUNCTIONS))}. Write it as a mapStates() function or a StatefulProcessor, or leave "
            "it to Spark's own groupBy().agg()"
        )
    arguments = [function.children().apply(at) for at in range(function.children().size())]
    ours = FUNCTIONS[known]
    if known == "count_if":
        argument = F.when(Column(to_column(arguments[0])), F.lit(True))
        return ReadAggregate(Aggregate(ours), argument, f"CASE WHEN {arguments[0].sql()} THEN true END")
    if ours == "count":
        if len(arguments) > 1:
            raise Invalid(f"{what}: {name!r} counts rows by several columns: count when(condition, lit(1)) instead")
        if _kind(arguments[0]) == "Literal" and arguments[0].value() is not None:
            return ReadAggregate(Aggregate("count"), None, "")
    if len(arguments) > 1 and ours in ("count_distinct", "max_by", "min_by"):
        columns = [Column(to_column(each)) for each in arguments]
        together = F.struct(*(each.alias(f"c{at}") for at, each in enumerate(columns)))
        if ours == "count_distinct":  # as in Spark, rows with a null do not count
            together = F.when(reduce(and_, (each.isNotNull() for each in columns)), together)
        return ReadAggregate(Aggregate(ours), together, ", ".join(str(each.sql()) for each in arguments))
    aggregate = Aggregate(ours)
    if ours in ("first", "last"):
        aggregate = Aggregate(ours, ignore_nulls=bool(function.ignoreNulls()))
    elif ours == "approx_count_distinct":
        aggregate = Aggregate(ours, rsd=float(function.relativeSD()))
    elif ours in ("mean", "sum"):
        aggregate = Aggregate(ours, ansi=ansi)
    return ReadAggregate(aggregate, Column(to_column(arguments[0])), str(arguments[0].sql()))


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
        raise Invalid(f"{what}: {text!r} is not a duration: {clip(error)}") from None
    if get_field(interval, "months"):
        raise Invalid(f"{what}: the duration {text!r} has months, which differ in length: give days")
    return int(get_field(interval, "days")) * 86_400_000_000 + int(get_field(interval, "microseconds"))


def moment_of(df: DataFrame, time: Column) -> Column:
    """Return the event time of a window: of a window's window, the last moment of the inner one, as in Spark."""
    kind = df.select(time).schema.fields[0].dataType
    return F.window_time(time) if isinstance(kind, StructType) else time
