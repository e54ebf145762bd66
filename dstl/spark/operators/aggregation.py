"""Grouped aggregations with event time and output modes, checked when the query is defined."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, get_args

from pyspark.sql import Column, DataFrame, GroupedData
from pyspark.sql import functions as F
from pyspark.sql.types import StructField, StructType

from dstl.errors import Invalid, brief, named
from dstl.spark.operators.aggregate_columns import AnalysedAggregation, GroupingWindow, analyse, moment_of
from dstl.spark.operators.arguments import time_to_live
from dstl.spark.operators.input_checks import MOMENTS, SESSION_WINDOW, WATERMARK_DELAY, check_hashable, check_stream
from dstl.spark.query.plan import operators_in_front, watermark_follows
from dstl.spark.task_definition import EventTime, OperatorPlace, TaskDefinition
from dstl.state.frames.row_writer import arrow_schema_of
from dstl.state.registry import StateRegistry
from dstl.state.vectorised.aggregation import LATE, WINDOW_END, WINDOW_START, AggregateStates, Aggregation, OutputMode
from dstl.state.vectorised.aggregation_runner import AggregationRunner
from dstl.state.vectorised.session_runner import SessionRunner

_TIME = "__dstl_time"
_START = "__dstl_start"
_END = "__dstl_end"


@dataclass(frozen=True, kw_only=True)
class AggregationDefinition(TaskDefinition):
    """An operator that aggregates by windows or other groups, with an output mode.

    Attributes:
        operator: What it computes.
    """

    operator: Aggregation

    @property
    def needs_marks(self) -> bool:
        """True where groups of a partition without rows may belong to the output, or end."""
        return self.operator.mode == "complete" or self.operator.expires is not None

    def declare(self, registry: StateRegistry) -> StateRegistry:
        """Return the registry with the groups' state.

        Raises:
            Invalid: The stored state was kept for another output mode, or has types that cannot go on.
        """
        known = {each.name: each for each in registry.descriptors}
        self.operator.check_known(known.get(AggregateStates.name), self.uid)
        return super().declare(registry)

    def task_runner(self, registry: StateRegistry) -> AggregationRunner | SessionRunner:
        """Return the runner of one task."""
        kind = SessionRunner if self.operator.session else AggregationRunner
        return kind(self.operator, operator=self.uid, registry=registry)


def check_input(rows: DataFrame, definition: TaskDefinition, repeating: set[str]) -> None:
    """Refuse an aggregate behind one whose groups come again with each of their changes, as Spark does.

    Args:
        rows: What the operator takes.
        definition: The operator; others than aggregates know what to do with such rows.
        repeating: The names of such aggregates; this one's is added where it is one.

    Raises:
        Invalid: A group would count once for each of its changes.
    """
    if not isinstance(definition, AggregationDefinition) or not rows.isStreaming:
        return
    for uid in sorted(operators_in_front(rows, definition.uid) & repeating):
        raise Invalid(
            f"operator {definition.uid!r}: its rows are results of operator {uid!r}, which sends a group again when it "
            f"changes, so that it would count several times: give {uid!r} outputMode='append', or keep the last of "
            "each group in a processor (transformWithState)"
        )
    if definition.operator.mode != "append":
        repeating.add(definition.uid)


def define_grouped_aggregation(
    df: DataFrame,
    cols: Sequence[Any],
    aggregate: Callable[[GroupedData], DataFrame],
    mode: str,
    ttl_ms: int | None,
    late: str | None,
    place: OperatorPlace,
) -> tuple[DataFrame, AggregationDefinition]:
    """Check a grouped aggregation; return its definition and the rows that it takes.

    Args:
        df: The input.
        cols: Grouping columns.
        aggregate: Calls PySpark's own ``agg``, ``count``, ``sum``, ...
        mode: The output mode.
        ttl_ms: Milliseconds after a group's last row at which it is gone; None for never.
        late: The output's column of late rows; None where they are dropped.
        place: Name and partitions; its grouping columns are not looked at.

    Raises:
        Invalid: Names the operator and what is wrong.
    """
    what = place.label
    check_stream(df, what)
    if not cols:
        raise Invalid(f"{what}: groupBy() names no column; there is no state without a key")
    modes: tuple[OutputMode, ...] = get_args(OutputMode)
    chosen = next((each for each in modes if isinstance(mode, str) and mode.lower() == each), None)
    if chosen is None:
        raise Invalid(f"{what}: output mode {brief(mode)} is not one of {', '.join(modes)}")
    found = analyse(df, cols, aggregate, what)
    if not found.aggregates:
        raise Invalid(f"{what}: there is nothing to aggregate; pass F.count('*').alias('n'), say")
    rows, definition = _Defined(df, found, chosen, place, time_to_live(what, ttl_ms), late).result()
    if ttl_ms is not None and (chosen != "update" or definition.operator.expires is not None):
        raise Invalid(
            f"{what}: ttlDurationMs={ttl_ms} is for groups without a watermark in output mode update: leave it out. "
            "Groups with a watermark end by it; in mode complete all are kept"
        )
    return rows, definition


class _Defined:
    """The columns of a grouped aggregation's rows, put together one after the other."""

    def __init__(
        self,
        df: DataFrame,
        found: AnalysedAggregation,
        mode: OutputMode,
        place: OperatorPlace,
        ttl_ms: int,
        late: str | None,
    ) -> None:
        self._ttl_ms = ttl_ms
        self._df = self._input = df
        self._found = found
        self._mode = mode
        self._place = place
        self._what = place.label
        self._columns: dict[str, Column] = {}
        count = len(found.grouping)
        self._grouping = found.schema.fields[:count]
        self._results = found.schema.fields[count:]
        self._output = found.schema
        if late is not None:
            if not isinstance(late, str) or not late:
                raise Invalid(f"{self._what}: lateColumnName={brief(late)} is no name of a column")
            # A late row has nothing else, so nothing else may be promised.
            fields = [StructField(f.name, f.dataType, metadata=f.metadata) for f in found.schema.fields]
            self._output = StructType([*fields, StructField(late, df.schema)])
        self._check_names()

    def result(self) -> tuple[DataFrame, AggregationDefinition]:
        """Return the rows and the definition."""
        marked = [field for field in self._grouping if WATERMARK_DELAY in (field.metadata or {})]
        if len(marked) > 1:
            raise Invalid(
                f"{self._what}: grouping columns {' and '.join(repr(f.name) for f in marked)} both have the watermark: "
                "group by one of them"
            )
        if self._mode == "append" and not marked:
            raise Invalid(
                f"{self._what}: output mode append emits a group when the watermark has passed it, and no grouping "
                "column has one: call df.withWatermark(column, delay) before, and group by window(column, ...) or by "
                "the column itself; or choose outputMode='update'"
            )
        others, keys, position = self._others(marked)
        aggregation = self._with_event_time(position, marked)
        aggregates = {}
        shown = dict(zip(others, (field.name for field in keys), strict=True))
        for at, (each, result) in enumerate(zip(self._found.aggregates, self._results, strict=True)):
            if each.argument is None:
                aggregates[result.name] = each.aggregate
                continue
            self._columns[f"__dstl_a{at}"] = each.argument
            shown[f"__dstl_a{at}"] = each.shown
            aggregates[result.name] = replace(each.aggregate, column=f"__dstl_a{at}", shown=each.shown)
        if self._output is not self._found.schema:
            if aggregation.expires is None:
                raise Invalid(
                    f"{self._what}: lateColumnName={self._output.names[-1]!r} is for groups that end with the "
                    "watermark, and no grouping column has one: call df.withWatermark(column, delay) before, and group "
                    "by window(column, ...) or by the column itself"
                )
            shown[LATE] = self._output.names[-1]
            self._columns[LATE] = F.struct(*(self._input[f"`{name}`"] for name in self._input.columns))
        rows = self._df
        if aggregation.windows is not None or aggregation.session:
            rows = rows.where(self._columns[_TIME].isNotNull())
        rows = rows.select([column.alias(name) for name, column in self._columns.items()])
        for field in rows.schema.fields:
            arrow_schema_of(
                StructType([StructField(shown.get(field.name, field.name), field.dataType)]), f"{self._what}: the input"
            )
        delay = int(marked[0].metadata[WATERMARK_DELAY]) if marked else None
        whole = replace(
            aggregation,
            aggregates=aggregates,
            key_schema=StructType([*aggregation.key_schema.fields, *keys]),
            others=tuple(others),
            input_schema=rows.schema,
            output_schema=self._output,
        )
        self._check_types(whole)
        definition = AggregationDefinition(
            **vars(replace(self._place, by=tuple(whole.key_schema.names))),
            placed_by=tuple(others) or (_START,),
            event_time=None
            if delay is None or whole.time is None
            else EventTime(whole.time, delay, watermark_follows(self._input)),
            operator=whole,
        )
        definition.resolve(None)  # What a task would refuse is refused here.
        return rows, definition

    def _others(self, marked: Sequence[StructField]) -> tuple[list[str], list[StructField], int | None]:
        """Return the rows' columns that are no window, those of the key, and the window's place."""
        names: list[str] = []
        keys: list[StructField] = []
        position = self._found.window.position if self._found.window else None
        for at, (column, field) in enumerate(zip(self._found.grouping, self._grouping, strict=True)):
            if column is None:
                continue
            check_hashable(field.dataType, field.name, self._what)
            if SESSION_WINDOW in (field.metadata or {}):
                raise Invalid(
                    f"{self._what}: grouping column {field.name!r} is a session window that was made before, and "
                    "sessions are merged where they are grouped: write session_window(...) among the grouping columns"
                )
            if field in marked and isinstance(field.dataType, StructType):
                position = at
                self._columns[_START], self._columns[_END] = column.getField("start"), column.getField("end")
                continue
            names.append(f"__dstl_g{at}")
            self._columns[names[-1]] = column
            keys.append(StructField(field.name, field.dataType))
        return names, keys, position

    def _with_event_time(self, position: int | None, marked: Sequence[StructField]) -> Aggregation:
        """Return the part of the definition that concerns event time."""
        window = self._found.window
        expires: str | None = None
        fields: list[StructField] = []
        more: dict[str, Any] = {}
        if position is not None:
            kind = self._grouping[position].dataType
            assert isinstance(kind, StructType)
            fields = [StructField(WINDOW_START, kind["start"].dataType), StructField(WINDOW_END, kind["end"].dataType)]
            expires = WINDOW_END if marked else None
            more = self._of_window(window, position)
        elif marked:
            expires = marked[0].name
            more = {"time": f"__dstl_g{self._grouping.index(marked[0])}"}
            if not isinstance(marked[0].dataType, MOMENTS):
                raise Invalid(f"{self._what}: the watermark's column {expires!r} is not a timestamp")
        return Aggregation(
            mode=self._mode,
            aggregates={},
            key_schema=StructType(fields),
            others=(),
            window=position,
            expires=expires,
            ttl_ms=self._ttl_ms,
            input_schema=StructType([]),
            output_schema=StructType([]),
            **more,
        )

    def _of_window(self, window: GroupingWindow | None, position: int) -> dict[str, Any]:
        if window is None:
            # The rows have their window. The event time it was made of says more, where it is still there.
            moments = [field for field in self._df.schema.fields if isinstance(field.dataType, MOMENTS)]
            own = [field.name for field in moments if WATERMARK_DELAY in (field.metadata or {})]
            self._columns[_TIME] = F.col(f"`{own[0]}`") if own else self._columns[_START]
            return {"time": _TIME, "starts": _START, "ends": _END}
        self._columns[_TIME] = moment_of(self._df, window.time)
        if window.windows is not None and len(self._grouping) > 1:
            return {"time": _TIME, "windows": window.windows}
        if window.windows is not None:
            if window.windows.overlap and self._output is not self._found.schema:
                raise Invalid(
                    f"{self._what}: lateColumnName with windows that overlap needs another grouping column, or "
                    "no task would see all windows of a row; F.lit(0).alias('all') is one"
                )
            # Groups are told apart by their window alone: Spark computes it, for rows are placed by it.
            self._df = self._df.withColumn("__dstl_window", _written(window, self._columns[_TIME]))
            field = F.col("__dstl_window")
            self._columns[_START], self._columns[_END] = field.getField("start"), field.getField("end")
            return {"time": _TIME, "starts": _START, "ends": _END}
        if self._mode == "update":
            raise Invalid(
                f"{self._what}: output mode update is not available with session_window, as in Spark: a session that "
                "is merged into another would have to be taken back. Choose append or complete"
            )
        if len(self._grouping) == 1:
            raise Invalid(
                f"{self._what}: session_window alone is no key, as in Spark: group by another column beside it; "
                "F.lit(0).alias('all') is one"
            )
        gap = window.gap if isinstance(window.gap, Column) else F.lit(window.gap)
        self._columns[_START] = self._columns[_TIME]
        self._columns[_END] = self._columns[_TIME] + gap.cast("interval")
        return {"time": _TIME, "starts": _START, "ends": _END, "session": True}

    def _check_types(self, aggregation: Aggregation) -> None:
        """Refuse a result of another type than Spark's."""
        with named(self._what):
            made = aggregation.accumulators()
        for field in self._results:
            ours = made[field.name].result
            if ours.simpleString() != field.dataType.simpleString():
                raise Invalid(
                    f"{self._what}: the aggregate {field.name!r} is {field.dataType.simpleString()} in Spark and "
                    f"{ours.simpleString()} here: cast its argument"
                )

    def _check_names(self) -> None:
        names = self._output.names
        twice = [name for name in names if names.count(name) > 1]
        if twice:
            raise Invalid(f"{self._what}: the result has two columns {twice[0]!r}: rename one with alias()")
        taken = [name for name in names if name.startswith(("$", "__dstl_")) or name in (WINDOW_START, WINDOW_END)]
        if taken:
            raise Invalid(f"{self._what}: the column name {taken[0]!r} is reserved by DSTL: rename it with alias()")


def _written(window: GroupingWindow, time: Column) -> Column:
    windows = window.windows
    assert windows is not None
    size, slide, offset = (f"{each} microseconds" for each in (windows.size, windows.slide, windows.offset))
    return F.window(time, size, slide, offset)
