"""The ways to define an operator: the part of :class:`~dstl.spark.StateBackend` that takes DataFrames."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, cast

from pyspark.sql import Column, DataFrame, GroupedData
from pyspark.sql.streaming import StatefulProcessor
from pyspark.sql.types import StructType

from dstl.errors import Invalid
from dstl.spark.operators.aggregate_columns import aggregate_columns, is_plain
from dstl.spark.operators.aggregation import define_grouped_aggregation
from dstl.spark.operators.arguments import OutputModeName, with_signature_of
from dstl.spark.operators.batch_query import batch_query
from dstl.spark.operators.broadcast import with_broadcast
from dstl.spark.operators.deduplication import define_deduplication
from dstl.spark.operators.event_time import passed_on
from dstl.spark.operators.grouped_stream import GroupedStream, grouping_columns
from dstl.spark.operators.initial_state import check_initial_state, with_initial_state
from dstl.spark.operators.keyed_function import define_aggregate, define_map_states
from dstl.spark.operators.processor import Style, define_processor
from dstl.spark.query.placement import keyed_input
from dstl.spark.query.ticks import interval_ms, with_marks, with_ticks
from dstl.spark.task_definition import OperatorPlace, TaskDefinition
from dstl.state.handle import TimeModeName
from dstl.state.vectorised.keyed_functions import Aggregate, StatesFunction

__all__ = ["StatefulOperators"]


class StatefulOperators(ABC):
    """Defines operators over DataFrames; a backend names them, expects their tasks and runs them."""

    @abstractmethod
    def _check_open(self) -> None:
        """Refuse a call to a backend that was closed."""

    @abstractmethod
    def _next_place(self, name: str | None, by: str | Sequence[str], parallelism: int | None) -> OperatorPlace:
        """Return the checked name, grouping columns and parallelism of the operator that is being defined."""

    @abstractmethod
    def _run(self, keyed: DataFrame, definition: TaskDefinition) -> DataFrame:
        """Expect the operator's tasks, bring the rows to their partitions and run them there."""

    def groupBy(self, df: DataFrame, *cols: str | Column | int | Sequence[str | Column | int]) -> GroupedStream:
        """Group a DataFrame as ``df.groupBy(*cols)`` does, to call PySpark's own methods on the result.

        ::

            -clicks.groupBy("page").transformWithState(Visits(), "page string, n long", "update", "none")
            +backend.groupBy(clicks, "page").transformWithState(Visits(), "page string, n long", "update", "none")

        Args:
            df: A DataFrame, streaming or not.
            cols: Grouping columns: names, columns or positions (from 1), or one list of them; for ``agg`` any
                expressions, ``window(...)`` and ``session_window(...)`` too.

        Returns:
            An object with ``agg``, ``transformWithState`` and ``transformWithStateInPandas`` with PySpark's arguments.

        Raises:
            Invalid: Something that is no grouping column.
        """
        self._check_open()
        if not isinstance(df, DataFrame):
            raise Invalid(f"groupBy: the input is {type(df).__name__}, not a DataFrame")
        return GroupedStream(self.transform_with_state, self._grouped_aggregation, df, grouping_columns(df, cols))

    def transform_with_state(
        self,
        df: DataFrame,
        *,
        by: str | Sequence[str],
        processor: StatefulProcessor,
        output: StructType | str,
        output_mode: OutputModeName = "append",
        time_mode: TimeModeName = "none",
        initial_state: DataFrame | GroupedData | None = None,
        tick: str | None = None,
        name: str | None = None,
        parallelism: int | None = None,
        event_time: str = "",
        broadcast: Mapping[str, DataFrame] | None = None,
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
            event_time: The output's event-time column, PySpark's ``eventTimeColumnName``: the operator's watermark goes
                with it to what follows, one of Spark's operators or of ours. A row with an event time at or before the
                watermark of the batch before is refused, since what follows would drop it as late.
            broadcast: Streams by name (batch DataFrames where ``df`` is one), whose rows reach every partition in their
                batch, before the keyed rows: ``handleBroadcastRows(name, rows)`` of the processor takes those of one
                stream, sorted by their columns, and keeps them in ``handle.getBroadcastState(name)``, a map that keyed
                rows and timers read. It yields nothing. Each row is sent to each partition, so this is for rules, not
                for data; give rows a version where one may replace another of the same batch. Keep the argument at
                restarts: the streams are sources that Spark counts.
            style: ``row``, or ``pandas`` as :meth:`transform_with_state_in_pandas` has it.

        Returns:
            A DataFrame, streaming as ``df`` is, that any sink can write.

        Raises:
            Invalid: A column does not exist, a type is not supported, or a name is taken: refused here, not in a task.
        """
        place = self._next_place(name, by, parallelism)
        definition = define_processor(
            df,
            place,
            processor=processor,
            output=output,
            output_mode=output_mode,
            time_mode=time_mode,
            style=style,
            has_initial_state=initial_state is not None,
            emitted_time=event_time,
            broadcast=broadcast,
        )
        interval = None if tick is None else interval_ms(tick, place.label)
        if interval is not None and not definition.has_timers:
            raise Invalid(f"{place.label}: tick={tick!r} serves timers, and time mode none has no timers")
        initial = check_initial_state(initial_state, definition) if initial_state is not None else None
        if not df.isStreaming:
            if tick is not None:
                raise Invalid(
                    f"{place.label}: tick={tick!r} makes batches of a stream, and the DataFrame is none: leave it out"
                )
            return batch_query(df, definition, initial, broadcast or {})
        keyed = keyed_input(df, definition)
        if initial is not None:
            keyed = with_initial_state(keyed, initial, definition)
        if interval is not None:
            keyed = with_ticks(keyed, interval)
        if definition.needs_marks:
            keyed = with_marks(keyed, definition.parallelism)
        if definition.streams:
            keyed = with_broadcast(keyed, broadcast or {}, definition)
        output_df = self._run(keyed, definition)
        if definition.emitted_time and definition.event_time is not None:
            return passed_on(output_df, definition.emitted_time, definition.event_time)
        return output_df

    @with_signature_of(transform_with_state)
    def transform_with_state_in_pandas(self, df: DataFrame, **arguments: Any) -> DataFrame:
        """Run a pandas-style ``StatefulProcessor``: ``handleInputRows`` gets and returns iterators of ``DataFrame``.

        Otherwise as :meth:`transform_with_state`, with the same arguments.
        """
        return self.transform_with_state(df, **arguments, style="pandas")

    def aggregate(
        self,
        df: DataFrame,
        *,
        by: str | Column | Sequence[str | Column],
        name: str | None = None,
        parallelism: int | None = None,
        ttl_ms: int | None = None,
        output_mode: OutputModeName = "update",
        **aggregates: Aggregate | Column,
    ) -> DataFrame:
        """Aggregate the rows of each key over all micro-batches, as ``groupBy(by).agg(...)`` does.

        ::

            backend.aggregate(df, by="sensor", n=count(), total=sum("value"), latest=last("value"))

        Each micro-batch yields the new aggregates of the keys that occurred in it, unless ``output_mode`` says
        otherwise. Where a grouping column has a watermark, rows are late, and groups end, as in Spark.

        Args:
            df: A streaming DataFrame.
            by: Grouping column or columns, ``window(...)`` and other expressions too. A null is a key like any other.
            name: The operator's name; see :meth:`transform_with_state`.
            parallelism: Partitions; by default the backend's.
            ttl_ms: Milliseconds of processing time after a key's last row at which its aggregates are gone; by default
                they live for ever. Not with event time or another output mode than update.
            output_mode: ``update``, ``append`` or ``complete``; see :meth:`GroupedStream.agg`.
            aggregates: What to compute, by the name of the output column (not ``df``, ``by``, ``name``,
                ``parallelism``, ``ttl_ms`` or ``output_mode``). They may be added and removed
                at a restart; one that is new, or was gone, starts from nothing.

        Returns:
            A streaming DataFrame of the grouping columns and the aggregates.

        Raises:
            Invalid: A column does not exist, its type cannot be aggregated so, or a name is taken: refused here, not in
                a task.
        """
        if is_plain(df, by, output_mode, aggregates):
            place = self._next_place(name, cast("str | Sequence[str]", by), parallelism)
            definition = define_aggregate(df, place, cast("Mapping[str, Aggregate]", aggregates), ttl_ms)
            return self._run(keyed_input(df, definition), definition)
        if ttl_ms is not None:
            raise Invalid(
                f"ttl_ms={ttl_ms!r} is for groups without event time, of which only the last word counts: leave it "
                "out; groups with event time end by the watermark"
            )
        columns = list(by) if isinstance(by, (list, tuple)) else [by]
        exprs = aggregate_columns(aggregates)
        return self._grouped_aggregation(df, columns, exprs, output_mode, name=name, parallelism=parallelism)

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
            name: The operator's name; see :meth:`transform_with_state`.
            parallelism: Partitions; by default the backend's.

        Returns:
            A streaming DataFrame of the same columns, with their watermark.

        Raises:
            Invalid: A column does not exist, a type is not supported, or a name is taken: refused here, not in a task.
        """
        return self._deduplicate(df, subset, name, parallelism, within_watermark=False)

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
            name: The operator's name; see :meth:`transform_with_state`.
            parallelism: Partitions; by default the backend's.

        Returns:
            A streaming DataFrame of the same columns, with their watermark.

        Raises:
            Invalid: There is no watermark, a column does not exist, or as :meth:`dropDuplicates`.
        """
        return self._deduplicate(df, subset, name, parallelism, within_watermark=True)

    def _deduplicate(
        self,
        df: DataFrame,
        subset: Sequence[str] | None,
        name: str | None,
        parallelism: int | None,
        *,
        within_watermark: bool,
    ) -> DataFrame:
        place = self._next_place(name, (), parallelism)
        return self._place(df, define_deduplication(df, subset, place, within_watermark=within_watermark))

    def _place(self, rows: DataFrame, definition: TaskDefinition) -> DataFrame:
        keyed = keyed_input(rows, definition)
        if definition.needs_marks:
            keyed = with_marks(keyed, definition.parallelism)
        return self._run(keyed, definition)

    def _grouped_aggregation(
        self,
        df: DataFrame,
        cols: Sequence[Any],
        exprs: Sequence[Column],
        mode: str,
        *,
        name: str | None = None,
        parallelism: int | None = None,
    ) -> DataFrame:
        place = self._next_place(name, (), parallelism)
        return self._place(*define_grouped_aggregation(df, cols, exprs, mode, place))

    def map_states(
        self,
        df: DataFrame,
        *,
        by: str | Sequence[str],
        state: StructType | str,
        output: StructType | str,
        function: StatesFunction,
        name: str | None = None,
        parallelism: int | None = None,
        ttl_ms: int | None = None,
    ) -> DataFrame:
        """Update the states of many keys at once with a function over Arrow tables.

        ``function(rows, keys, states)`` returns ``(new_states, output)``, where all are ``pyarrow.Table`` s:

        - ``rows``: the input's columns, and ``__group``, which says which row of ``keys`` each row belongs to. Rows of
          one key stand in the order in which they came.
        - ``keys``: the grouping columns of the distinct keys, each once.
        - ``states``: for each row of ``keys`` its prior state, and ``__exists``: False (and nulls) where it has none.
        - ``new_states``: one row for each row of ``keys``, in their order, with the state's columns, matched by name.
          With a boolean column ``__exists``, False removes the key's state. Unchanged states cost nothing. None leaves
          all states as they are.
        - ``output``: any rows of the output schema, matched by name, or None.

        It is called about once per partition and micro-batch; more often where a partition has millions of rows. A key
        is in one call of a micro-batch only, with all its rows.

        Args:
            df: A streaming DataFrame.
            by: Grouping column or columns. A null is a key like any other.
            state: Columns of a key's state. At a restart they can be removed, reordered and widened, and columns that
                may be null can be added.
            output: Columns of the output.
            function: The function; it is shipped to the workers.
            name: The operator's name; see :meth:`transform_with_state`.
            parallelism: Partitions; by default the backend's.
            ttl_ms: Milliseconds of processing time at which a state is gone that no call has returned since. Every
                returned state is then written, changed or not. By default states live for ever.

        Returns:
            A streaming DataFrame that any sink can write.

        Raises:
            Invalid: A column does not exist, a type is not supported, a name is taken, or the function does not take
                three arguments: refused here, not in a task.
        """
        place = self._next_place(name, by, parallelism)
        definition = define_map_states(df, place, state, output, function, ttl_ms)
        return self._run(keyed_input(df, definition), definition)
