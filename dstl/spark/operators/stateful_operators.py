"""The ways to define an operator: the part of :class:`~dstl.spark.StateBackend` that takes DataFrames."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from pyspark.sql import Column, DataFrame

from dstl.errors import Invalid
from dstl.spark.operators.deduplication import define_deduplication
from dstl.spark.operators.grouped_stream import GroupedStream, OperatorHost, grouping_columns


class StatefulOperators(ABC):
    """Defines operators over DataFrames; a backend names them, expects their tasks and runs them."""

    @abstractmethod
    def _operator_host(self) -> OperatorHost:
        """Return what takes operators; refuse a call to a backend that was closed."""

    def groupBy(self, df: DataFrame, *cols: str | Column | int | Sequence[str | Column | int]) -> GroupedStream:
        """Group a DataFrame as ``df.groupBy(*cols)`` does, to call PySpark's own methods on the result.

        ::

            -clicks.groupBy("page").transformWithState(Visits(), "page string, n long", "update", "none")
            +backend.groupBy(clicks, "page").transformWithState(Visits(), "page string, n long", "update", "none")

        Args:
            df: A DataFrame, streaming or not.
            cols: Grouping columns: names, columns or positions (from 1), or one list of them; for aggregates any
                expressions, ``window(...)`` and ``session_window(...)`` too. A null is a key like any other.

        Returns:
            An object with PySpark's ``agg``, ``count``, ``sum``, ``avg``, ``mean``, ``min``, ``max``,
            ``transformWithState`` and ``transformWithStateInPandas``, with their arguments; and with ``mapStates``.

        Raises:
            Invalid: Something that is no grouping column.
        """
        host = self._operator_host()
        if not isinstance(df, DataFrame):
            raise Invalid(f"groupBy: the input is {type(df).__name__}, not a DataFrame")
        return GroupedStream(host, df, grouping_columns(df, cols))

    def dropDuplicates(
        self,
        df: DataFrame,
        subset: Sequence[str] | None = None,
        *,
        name: str | None = None,
        parallelism: int | None = None,
    ) -> DataFrame:
        """Let the first row of each key pass, as ``df.dropDuplicates(subset)`` does.

        Where the DataFrame has a watermark, rows behind it are dropped; where its column is one of ``subset``, keys
        that it has passed are forgotten. Otherwise keys are kept for ever.

        Args:
            df: A streaming DataFrame.
            subset: Columns that tell rows apart; by default all. A null is equal to a null.
            name: The operator's name, under which its state is found at a restart.
            parallelism: Partitions; by default the backend's.

        Returns:
            A streaming DataFrame of the same columns, with their watermark.

        Raises:
            Invalid: A column does not exist, a type is not supported, or a name is taken: refused here, not in a task.
        """
        host = self._operator_host()
        place = host.place_of(name, (), parallelism)
        return host.run_marked(df, define_deduplication(df, subset, place, within_watermark=False))

    def dropDuplicatesWithinWatermark(
        self,
        df: DataFrame,
        subset: Sequence[str] | None = None,
        *,
        name: str | None = None,
        parallelism: int | None = None,
    ) -> DataFrame:
        """Let the first row of each key pass, as ``df.dropDuplicatesWithinWatermark(subset)`` does.

        A key is forgotten when the watermark has passed the event time of its first row by the watermark's delay.
        Rows behind the watermark are dropped.

        Args:
            df: A streaming DataFrame with a watermark.
            subset: Columns that tell rows apart; by default all. A null is equal to a null.
            name: The operator's name, under which its state is found at a restart.
            parallelism: Partitions; by default the backend's.

        Returns:
            A streaming DataFrame of the same columns, with their watermark.

        Raises:
            Invalid: There is no watermark, a column does not exist, or as :meth:`dropDuplicates`.
        """
        host = self._operator_host()
        place = host.place_of(name, (), parallelism)
        return host.run_marked(df, define_deduplication(df, subset, place, within_watermark=True))
