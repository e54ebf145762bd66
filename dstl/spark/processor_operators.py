"""The processor half of :class:`~dstl.spark.StateBackend`: PySpark's ``StatefulProcessor`` classes, unchanged."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec

from pyspark.sql import Column, DataFrame, GroupedData
from pyspark.sql.streaming import StatefulProcessor
from pyspark.sql.types import StructType

from dstl.errors import Invalid
from dstl.spark.arguments import column_names
from dstl.spark.batch_query import batch_query
from dstl.spark.grouped_stream import GroupedStream, grouping_columns
from dstl.spark.initial_state import check_initial_state, with_initial_state
from dstl.spark.key_groups import KEY_GROUP_COLUMN, key_group_column
from dstl.spark.operator import OperatorDefinition, Style, define_operator
from dstl.spark.operators import Operators, observed
from dstl.spark.ticks import interval_ms, with_marks, with_ticks

__all__ = ["ProcessorOperators"]

P = ParamSpec("P")


def _taking_what(of: Callable[P, DataFrame]) -> Callable[[Callable[..., DataFrame]], Callable[P, DataFrame]]:
    """Give a method the signature of another one, but for ``style``, which it decides."""

    def adopt(method: Callable[..., DataFrame]) -> Callable[P, DataFrame]:
        taken = inspect.signature(of)
        parameters = [each for name, each in taken.parameters.items() if name != "style"]
        method.__signature__ = taken.replace(parameters=parameters)  # type: ignore[attr-defined]
        return method

    return adopt


class ProcessorOperators(Operators):
    """What a backend offers for stateful processors; the backend is its only subclass."""

    def groupBy(self, df: DataFrame, *cols: str | Column | int | Sequence[str | Column | int]) -> GroupedStream:
        """Group a DataFrame as ``df.groupBy(*cols)`` does, to call PySpark's own methods on the result.

        ::

            -clicks.groupBy("page").transformWithState(Visits(), "page string, n long", "update", "none")
            +backend.groupBy(clicks, "page").transformWithState(Visits(), "page string, n long", "update", "none")

        Args:
            df: A DataFrame, streaming or not.
            cols: Grouping columns: names, columns or positions (from 1), or one list of them.

        Returns:
            What has ``transformWithState`` and ``transformWithStateInPandas`` with PySpark's arguments.

        Raises:
            Invalid: An expression that is no column of ``df``: add it with ``withColumn`` before.
        """
        self._check_open()
        if not isinstance(df, DataFrame):
            raise Invalid(f"groupBy: the input is {type(df).__name__}, not a DataFrame")
        return GroupedStream(self, df, grouping_columns(df, cols))

    def transform_with_state(
        self,
        df: DataFrame,
        *,
        by: str | Sequence[str],
        processor: StatefulProcessor,
        output: StructType | str,
        output_mode: str = "append",
        time_mode: str = "none",
        initial_state: DataFrame | GroupedData | None = None,
        tick: str | None = None,
        name: str | None = None,
        parallelism: int | None = None,
        style: Style = "row",
    ) -> DataFrame:
        """Run a Row-style ``StatefulProcessor`` over a DataFrame, as ``groupBy(by).transformWithState`` does.

        Args:
            df: A streaming DataFrame; or a batch one, whose state begins empty and ends with the query. Then nothing is
                stored, the state of a partition must fit its worker's memory, and the operator is none of the streaming
                query's. As in Spark, timers of processing time that are due when the query begins fire once, behind the
                rows, and those of event time never.
            by: Grouping column or columns. A null is a key like any other.
            processor: PySpark's own class, unchanged: ``handleInputRows`` gets and returns iterators of ``Row``. Called
                once per key and micro-batch with all of the key's rows; Spark promises no order among them.
            output: Schema of what it returns.
            output_mode: ``append`` or ``update``: what the sink is promised. Of a batch query also ``complete``.
            time_mode: ``none``, ``processingTime`` or ``eventTime``. The watermark is that of the rows that reach the
                operator; where their only event-time column is a window, it follows the windows' starts.
            initial_state: A batch DataFrame with the grouping columns: each of its rows is given to
                ``handleInitialState`` once, in the query's first batch, before its key's input. Keep the argument at
                restarts of a stream: it is one of the sources that Spark counts.
            tick: Have a batch at least this often (``"10 seconds"``), so that timers fire without input. Shorter: they
                fire sooner; longer: fewer batches, each of which costs a checkpoint. By default timers fire in the next
                batch with data of any key. Keep the argument at restarts; its value may change.
            name: The operator's name, under which its state is found at a restart; by default ``operator-<n>`` in the
                order of definition. Give one to be free to add and remove operators later.
            parallelism: Partitions; by default the backend's.
            style: ``row``, or ``pandas`` as :meth:`transform_with_state_in_pandas` has it.

        Returns:
            A DataFrame, streaming as ``df`` is, that any sink can write.

        Raises:
            Invalid: A column does not exist, a type is not supported, or a name is taken: refused here, not in a task.
        """
        uid, partitions = self._next_operator(name, parallelism)
        what = f"operator {uid!r}"
        definition: OperatorDefinition = define_operator(
            df,
            uid=uid,
            by=column_names(by, what),
            processor=processor,
            output=output,
            output_mode=output_mode,
            time_mode=time_mode,
            style=style,
            parallelism=partitions,
            max_parallelism=self.max_parallelism,
            has_initial_state=initial_state is not None,
        )
        interval = None if tick is None else interval_ms(tick, what)
        if interval is not None and not definition.has_timers:
            raise Invalid(f"{what}: tick={tick!r} serves timers, and time mode none has no timers")
        initial = None if initial_state is None else check_initial_state(initial_state, definition.key_schema, what)
        if not df.isStreaming:
            if tick is not None:
                raise Invalid(
                    f"{what}: tick={tick!r} makes batches of a stream, and the DataFrame is none: leave it out"
                )
            return batch_query(df, definition, initial)
        self._add(definition)
        key_group = key_group_column(definition.by, self.max_parallelism)
        keyed = observed(df, uid).withColumn(KEY_GROUP_COLUMN, key_group)
        if initial is not None:
            keyed = with_initial_state(keyed, initial, definition.by, key_group, KEY_GROUP_COLUMN)
        if interval is not None:
            keyed = with_ticks(keyed, interval)
        if definition.needs_marks:
            keyed = with_marks(keyed, partitions)
        return self._placed(keyed, definition)

    @_taking_what(transform_with_state)
    def transform_with_state_in_pandas(self, df: DataFrame, **arguments: Any) -> DataFrame:
        """Run a pandas-style ``StatefulProcessor``: ``handleInputRows`` gets and returns iterators of ``DataFrame``.

        Otherwise as :meth:`transform_with_state`, with the same arguments.
        """
        return self.transform_with_state(df, **arguments, style="pandas")
