"""A grouped DataFrame with PySpark's own methods: one call changes when a job moves to DSTL."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypedDict

from pyspark.errors import PySparkException
from pyspark.sql import Column, DataFrame, GroupedData
from pyspark.sql import functions as F
from pyspark.sql.streaming import StatefulProcessor
from pyspark.sql.types import StructType

from dstl.errors import Invalid, brief
from dstl.spark.operators.arguments import OutputModeName, with_signature_of
from dstl.spark.operators.processor import Style
from dstl.state.handle import TimeModeName

if TYPE_CHECKING:
    from typing import Unpack

__all__ = ["AggregateArguments", "GroupedStream", "OperatorArguments", "grouping_columns"]


class OperatorArguments(TypedDict, total=False):
    """Arguments that DSTL takes beside PySpark's; see :meth:`StateBackend.transform_with_state`.

    Attributes:
        tick: Have a batch at least this often, so that timers fire without input.
        name: The operator's name, under which its state is found at a restart.
        parallelism: Partitions; by default the backend's.
        broadcast: Streams by name whose rows every partition gets.
    """

    tick: str | None
    broadcast: Mapping[str, DataFrame] | None
    name: str | None
    parallelism: int | None


class AggregateArguments(TypedDict, total=False):
    """Arguments of :meth:`GroupedStream.agg` beside PySpark's.

    Attributes:
        name: The operator's name, under which its state is found at a restart.
        parallelism: Partitions; by default the backend's.
    """

    name: str | None
    parallelism: int | None


class GroupedStream:
    """The result of ``backend.groupBy(df, ...)``: PySpark's ``GroupedData``, as far as it is kept here.

    Args:
        transform: The backend's :meth:`~dstl.spark.StateBackend.transform_with_state`.
        aggregate: Runs a grouped aggregation: takes the DataFrame, grouping columns, aggregate columns, output mode,
            and name and parallelism.
        df: The DataFrame, a stream or not.
        by: Its grouping columns.
        style: Of the processors that :meth:`transformWithState` takes.
    """

    def __init__(
        self,
        transform: Callable[..., DataFrame],
        aggregate: Callable[..., DataFrame],
        df: DataFrame,
        by: Sequence[str | Column],
        style: Style = "row",
    ) -> None:
        self._transform = transform
        self._aggregate = aggregate
        self._style = style
        self._df = df
        self._by = list(by)

    def __repr__(self) -> str:
        return f"GroupedStream[{', '.join(each if isinstance(each, str) else repr(each) for each in self._by)}]"

    def agg(
        self,
        *exprs: Column | dict[str, str],
        outputMode: OutputModeName = "update",
        **operator: Unpack[AggregateArguments],
    ) -> DataFrame:
        """Aggregate the rows of each group over all micro-batches, as PySpark's ``GroupedData.agg`` does.

        Args:
            exprs: PySpark's own aggregate columns, under their aliases: ``count``, ``sum``, ``avg``, ``min``, ``max``,
                ``first``, ``last`` and ``approx_count_distinct``. Or one dict of column and function.
            outputMode: The part of the result that a batch yields, as Spark's output mode of a query says it.
                ``update``: the groups that had rows; ``append``: each group once, when the watermark has passed it,
                which needs an event time among the grouping columns; ``complete``: all groups, which are kept for
                ever. The sink's own mode is ``update``, or ``append``, whatever is chosen here.
            operator: ``name`` and ``parallelism``.

        Returns:
            A streaming DataFrame of the grouping columns and the aggregates, with Spark's names and types. A window
            that had a watermark has it in the result.

        Raises:
            Invalid: Something is not kept here, or Spark does not take it: refused here, not in a task.
        """
        columns: list[Column] = []
        for each in exprs:
            if isinstance(each, Column):
                columns.append(each)
            elif isinstance(each, dict) and len(exprs) == 1:
                columns += [F.call_function(function, F.col(column)) for column, function in each.items()]
            else:
                raise Invalid(f"agg({brief(each)}): give aggregate columns such as F.sum('amount').alias('total')")
        return self._aggregate(self._df, self._by, columns, outputMode, **operator)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or not hasattr(GroupedData, name):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        raise Invalid(
            f"groupBy(...).{name} is not kept in DSTL; here are agg, transformWithState and "
            "transformWithStateInPandas, and backend.aggregate(df, by=..., n=count())"
        )

    def transformWithState(
        self,
        statefulProcessor: StatefulProcessor,
        outputStructType: StructType | str,
        outputMode: OutputModeName,
        timeMode: TimeModeName,
        initialState: GroupedData | DataFrame | None = None,
        eventTimeColumnName: str = "",
        **operator: Unpack[OperatorArguments],
    ) -> DataFrame:
        """Run a Row-style processor, as PySpark's ``GroupedData.transformWithState`` does; its names, its places.

        Args:
            statefulProcessor: PySpark's own class, unchanged.
            outputStructType: Schema of what it returns.
            outputMode: ``append`` or ``update``, in any case.
            timeMode: ``none``, ``processingTime`` or ``eventTime``, in any case.
            initialState: A batch DataFrame grouped by the same columns.
            eventTimeColumnName: The output's event-time column. The watermark that the operator goes by is passed on
                with it, to one of Spark's operators or of ours; a row at or before the watermark of the batch before is
                refused, as in Spark.
            operator: ``tick``, ``name``, ``parallelism`` and ``broadcast``.

        Returns:
            A DataFrame, streaming as the grouped one is, that any sink can write.

        Raises:
            Invalid: As :meth:`StateBackend.transform_with_state`.
        """
        return self._transform(
            self._df,
            by=[self._name(each) for each in self._by],
            processor=statefulProcessor,
            output=outputStructType,
            output_mode=outputMode,
            time_mode=timeMode,
            initial_state=initialState,
            event_time=eventTimeColumnName,
            style=self._style,
            **operator,
        )

    def _name(self, one: str | Column) -> str:
        if isinstance(one, str):
            return one
        raise Invalid(
            f"groupBy({one!r}) is no column of the stream, which a processor's key must be: add it with withColumn() "
            "and group by its name"
        )

    @with_signature_of(transformWithState)
    def transformWithStateInPandas(self, *arguments: Any, **named: Any) -> DataFrame:
        """Run a pandas-style processor; otherwise as :meth:`transformWithState`."""
        grouped = GroupedStream(self._transform, self._aggregate, self._df, self._by, "pandas")
        return grouped.transformWithState(*arguments, **named)


def grouping_columns(df: DataFrame, cols: Sequence[Any]) -> list[str | Column]:
    """Return the columns that ``df.groupBy(*cols)`` would group by: names, and expressions as they are.

    Raises:
        Invalid: Something is neither; names it.
    """
    given = cols[0] if len(cols) == 1 and isinstance(cols[0], (list, tuple)) else cols
    return [_column(df, one) for one in given]


def _column(df: DataFrame, one: Any) -> str | Column:
    if isinstance(one, str):
        return one
    if isinstance(one, int) and not isinstance(one, bool):
        if not 1 <= one <= len(df.columns):
            raise Invalid(f"groupBy({one}): positions go from 1 to {len(df.columns)}, the number of columns")
        return str(df.columns[one - 1])
    if isinstance(one, Column):
        # A plain column shows itself by its name; a nested field, an alias and any other expression do not.
        name = _shown_name(df, one)
        if name in df.columns and repr(one) in (f"Column<'{name}'>", f"Column<'`{name}`'>"):
            return str(name)
        return one
    raise Invalid(f"groupBy({one!r}) is neither a column of the stream nor an expression")


def _shown_name(df: DataFrame, one: Column) -> str:
    """Return the name of the column that an expression makes; empty where it makes none by itself."""
    try:
        (name,) = df.select(one).columns
    except PySparkException:
        return ""  # a session window, say: whoever aggregates by it is told what is wrong
    return str(name)
