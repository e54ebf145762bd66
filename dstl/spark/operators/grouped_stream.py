"""A grouped DataFrame with PySpark's own methods: one call changes when a job moves to DSTL."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypedDict

from pyspark.sql import Column, DataFrame, GroupedData
from pyspark.sql.streaming import StatefulProcessor
from pyspark.sql.types import StructType

from dstl.errors import Invalid
from dstl.spark.operators.arguments import with_signature_of
from dstl.spark.operators.processor import Style

if TYPE_CHECKING:
    from typing import Unpack

__all__ = ["GroupedStream", "OperatorArguments", "grouping_columns"]


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


class GroupedStream:
    """The result of ``backend.groupBy(df, ...)``: PySpark's ``GroupedData``, as far as stateful processors go.

    Args:
        transform: The backend's :meth:`~dstl.spark.StateBackend.transform_with_state`.
        df: The DataFrame, a stream or not.
        by: Its grouping columns.
        style: Of the processors that :meth:`transformWithState` takes.
    """

    def __init__(
        self, transform: Callable[..., DataFrame], df: DataFrame, by: Sequence[str], style: Style = "row"
    ) -> None:
        self._transform = transform
        self._style = style
        self._df = df
        self._by = list(by)

    def __repr__(self) -> str:
        return f"GroupedStream[{', '.join(self._by)}]"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or not hasattr(GroupedData, name):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        raise Invalid(
            f"groupBy(...).{name} is not kept in DSTL; here are transformWithState and transformWithStateInPandas, and "
            "backend.aggregate(df, by=..., n=count()) for aggregates"
        )

    def transformWithState(
        self,
        statefulProcessor: StatefulProcessor,
        outputStructType: StructType | str,
        outputMode: str,
        timeMode: str,
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
            by=self._by,
            processor=statefulProcessor,
            output=outputStructType,
            output_mode=outputMode,
            time_mode=timeMode,
            initial_state=initialState,
            event_time=eventTimeColumnName,
            style=self._style,
            **operator,
        )

    @with_signature_of(transformWithState)
    def transformWithStateInPandas(self, *arguments: Any, **named: Any) -> DataFrame:
        """Run a pandas-style processor; otherwise as :meth:`transformWithState`."""
        return GroupedStream(self._transform, self._df, self._by, "pandas").transformWithState(*arguments, **named)


def grouping_columns(df: DataFrame, cols: Sequence[Any]) -> list[str]:
    """Return the names of the columns that ``df.groupBy(*cols)`` would group by.

    Raises:
        Invalid: Something is not a column of ``df``; names it.
    """
    given = cols[0] if len(cols) == 1 and isinstance(cols[0], (list, tuple)) else cols
    return [_name(df, one) for one in given]


def _name(df: DataFrame, one: Any) -> str:
    if isinstance(one, str):
        return one
    if isinstance(one, int) and not isinstance(one, bool):
        if not 1 <= one <= len(df.columns):
            raise Invalid(f"groupBy({one}): positions go from 1 to {len(df.columns)}, the number of columns")
        return str(df.columns[one - 1])
    if isinstance(one, Column):
        # A plain column shows itself by its name; a nested field, an alias and any other expression do not.
        (name,) = df.select(one).columns
        if name in df.columns and repr(one) in (f"Column<'{name}'>", f"Column<'`{name}`'>"):
            return str(name)
    raise Invalid(f"groupBy({one!r}) is no column of the stream: add it with withColumn() and group by its name")
