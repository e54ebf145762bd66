"""A grouped DataFrame with PySpark's own methods: one call changes when a job moves to DSTL."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict

from pyspark.errors import PySparkException
from pyspark.sql import Column, DataFrame, GroupedData
from pyspark.sql.streaming import StatefulProcessor
from pyspark.sql.types import StructType

from dstl.errors import Invalid, brief
from dstl.spark.operators.aggregate_columns import check_classic
from dstl.spark.operators.aggregation import define_grouped_aggregation
from dstl.spark.operators.arguments import OutputModeName, parse_ddl, with_signature_of
from dstl.spark.operators.batch_query import batch_query
from dstl.spark.operators.broadcast import with_broadcast
from dstl.spark.operators.event_time import passed_on
from dstl.spark.operators.initial_state import check_initial_state, with_initial_state
from dstl.spark.operators.map_states import define_map_states
from dstl.spark.operators.processor import TransformCall, define_processor
from dstl.spark.query.placement import keyed_input
from dstl.spark.query.ticks import interval_ms, with_marks, with_ticks
from dstl.spark.task_definition import OperatorPlace, TaskDefinition
from dstl.state.descriptor import DeclaredSchemas
from dstl.state.group_state_processor import TIME_MODES, GroupFunction, GroupStateProcessor
from dstl.state.handle import TimeModeName
from dstl.state.keyed_batch import Style
from dstl.state.vectorised.map_states import StatesFunction

if TYPE_CHECKING:
    from typing import Unpack


class ProcessorArguments(TypedDict, total=False):
    """Arguments of :meth:`GroupedStream.transformWithState` beside PySpark's.

    Attributes:
        tick: Have a batch at least this often (``"10 seconds"``), so that timers fire without input. Shorter: they fire
            sooner; longer: fewer batches, each of which costs a checkpoint. By default timers fire in the next batch
            with data of any key. It may come and go at restarts.
        broadcast: Streams by name (batch DataFrames where the grouped one is one), whose rows reach every partition in
            their batch, before the keyed rows: ``handleBroadcastRows(name, rows)`` of the processor takes those of one
            stream, sorted by their columns, and keeps them in ``handle.getBroadcastState(name)``, a map that keyed rows
            and timers read. It yields nothing. Each row is sent to each partition, so this is for rules, not for data;
            give rows a version where one may replace another of the same batch. Keep the argument at restarts: the
            streams are sources that Spark counts.
        name: The operator's name, under which its state is found at a restart; by default ``operator-<n>`` in the order
            of definition. Give one to be free to add and remove operators later.
        parallelism: Partitions; by default the backend's.
    """

    tick: str | None
    broadcast: Mapping[str, DataFrame] | None
    name: str | None
    parallelism: int | None


class AggregateArguments(TypedDict, total=False):
    """Arguments of :meth:`GroupedStream.agg`, ``count``, ``sum``, ... beside PySpark's.

    Attributes:
        outputMode: The part of the result that a batch yields, as Spark's output mode of a query says it. ``update``,
            the default: the groups that had rows; ``append``: each group once, when the watermark has passed it, which
            needs an event time among the grouping columns; ``complete``: all groups, which are kept for ever. The
            sink's own mode is ``update``, or ``append``, whatever is chosen here.
        ttlDurationMs: Milliseconds of processing time after a group's last row at which its aggregates are gone; by
            default they stay. Every group with rows is then written, changed or not. Of output mode update alone, and
            not with a watermark among the grouping columns, which ends groups itself.
        lateColumnName: A column that the result gets behind the others, for rows that came too late for all of their
            groups: such a row is one of the result, with the input's columns as a struct there, and null elsewhere. In
            all other rows it is null. By default late rows are dropped. Needs a watermark among the grouping columns,
            and brings each row whole to its task, not only what is aggregated.
        name: The operator's name, under which its state is found at a restart.
        parallelism: Partitions; by default the backend's.
    """

    outputMode: OutputModeName
    ttlDurationMs: int | None
    lateColumnName: str | None
    name: str | None
    parallelism: int | None


class OperatorHost(NamedTuple):
    """The backend as far as it takes operators.

    Attributes:
        place_of: Returns the place of the operator that is being defined, given its name, grouping columns and
            parallelism, which are checked.
        run: Expects the operator's tasks, brings the rows to their partitions and runs them there.
    """

    place_of: Callable[[str | None, Sequence[str], int | None], OperatorPlace]
    run: Callable[[DataFrame, TaskDefinition], DataFrame]

    def run_marked(self, rows: DataFrame, definition: TaskDefinition) -> DataFrame:
        """Run an operator over rows, with a mark for each partition where it needs them."""
        keyed = keyed_input(rows, definition)
        if definition.needs_marks:
            keyed = with_marks(keyed, definition.parallelism)
        return self.run(keyed, definition)


class GroupedStream:
    """The result of ``backend.groupBy(df, ...)``: PySpark's ``GroupedData``, as far as it is kept here.

    Args:
        host: The backend, as far as it takes operators.
        df: The DataFrame, a stream or not.
        by: Its grouping columns.
    """

    def __init__(self, host: OperatorHost, df: DataFrame, by: Sequence[str | Column]) -> None:
        self._host = host
        self._df = df
        self._by = list(by)

    def __repr__(self) -> str:
        return f"GroupedStream[{', '.join(each if isinstance(each, str) else repr(each) for each in self._by)}]"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or not hasattr(GroupedData, name):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        here = ", ".join(each for each in vars(GroupedStream) if not each.startswith("_"))
        raise Invalid(f"groupBy(...).{name} is not available in DSTL; available are {here}")

    def agg(self, *exprs: Column | dict[str, str], **operator: Unpack[AggregateArguments]) -> DataFrame:
        """Aggregate the rows of each group over all micro-batches, as PySpark's ``GroupedData.agg`` does.

        ::

            backend.groupBy(df, "sensor").agg(F.count("*").alias("n"), F.sum("value").alias("total"))

        Args:
            exprs: PySpark's own aggregate columns, under their aliases: ``count``, ``sum``, ``avg``, ``min``, ``max``,
                ``first``, ``last``, ``any_value``, ``min_by``, ``max_by``, ``bool_and``, ``bool_or``, ``count_if``,
                ``stddev``, ``variance``, ``approx_count_distinct``; and ``collect_list``, ``collect_set`` and
                ``count_distinct``, which keep a group's values as one value of its state, so they are for groups of
                few. Or one dict of column and function. They may be added and removed at a restart; one that is new,
                or was gone, starts from nothing.
            operator: ``outputMode``, ``ttlDurationMs``, ``lateColumnName``, ``name`` and ``parallelism``; see
                :class:`AggregateArguments`.

        Returns:
            A streaming DataFrame of the grouping columns and the aggregates, with Spark's names and types. A window
            that had a watermark has it in the result.

        Raises:
            Invalid: Something is not kept here, or Spark does not take it: refused here, not in a task.
        """
        if not exprs:
            raise Invalid("agg() names no aggregate; pass F.count('*').alias('n'), say")
        for each in exprs:
            if not isinstance(each, Column) and not (isinstance(each, dict) and len(exprs) == 1):
                raise Invalid(f"agg({brief(each)}): give aggregate columns such as F.sum('amount').alias('total')")
        check_classic(exprs, "agg()")
        return self._aggregated(lambda grouped: grouped.agg(*exprs), **operator)

    def count(self, **operator: Unpack[AggregateArguments]) -> DataFrame:
        """Count the rows of each group, in the column ``count``; otherwise as :meth:`agg`."""
        return self._aggregated(lambda grouped: grouped.count(), **operator)

    def sum(self, *cols: str, **operator: Unpack[AggregateArguments]) -> DataFrame:
        """Add up columns, by default all that are numbers, in ``sum(x)``; otherwise as :meth:`agg`."""
        return self._of_columns("sum", cols, **operator)

    def avg(self, *cols: str, **operator: Unpack[AggregateArguments]) -> DataFrame:
        """Take the mean of columns, by default of all that are numbers, in ``avg(x)``; otherwise as :meth:`agg`."""
        return self._of_columns("avg", cols, **operator)

    def mean(self, *cols: str, **operator: Unpack[AggregateArguments]) -> DataFrame:
        """Do what :meth:`avg` does, under PySpark's other name of it."""
        return self._of_columns("mean", cols, **operator)

    def min(self, *cols: str, **operator: Unpack[AggregateArguments]) -> DataFrame:
        """Take the least of columns, by default of all that are numbers, in ``min(x)``; otherwise as :meth:`agg`."""
        return self._of_columns("min", cols, **operator)

    def max(self, *cols: str, **operator: Unpack[AggregateArguments]) -> DataFrame:
        """Take the most of columns, by default of all that are numbers, in ``max(x)``; otherwise as :meth:`agg`."""
        return self._of_columns("max", cols, **operator)

    def _of_columns(self, function: str, cols: Sequence[str], **operator: Unpack[AggregateArguments]) -> DataFrame:
        for each in cols:
            if not isinstance(each, str):
                raise Invalid(f"{function}({brief(each)}): give names of columns, as PySpark's own {function}() takes")
        return self._aggregated(lambda grouped: getattr(grouped, function)(*cols), **operator)

    def _aggregated(
        self,
        aggregate: Callable[[GroupedData], DataFrame],
        outputMode: OutputModeName = "update",
        ttlDurationMs: int | None = None,
        lateColumnName: str | None = None,
        name: str | None = None,
        parallelism: int | None = None,
    ) -> DataFrame:
        place = self._host.place_of(name, (), parallelism)
        given = outputMode, ttlDurationMs, lateColumnName
        rows, definition = define_grouped_aggregation(self._df, self._by, aggregate, *given, place)
        return self._host.run_marked(rows, definition)

    def transformWithState(
        self,
        statefulProcessor: StatefulProcessor,
        outputStructType: StructType | str,
        outputMode: OutputModeName,
        timeMode: TimeModeName,
        initialState: GroupedData | DataFrame | None = None,
        eventTimeColumnName: str = "",
        **operator: Unpack[ProcessorArguments],
    ) -> DataFrame:
        """Run a Row-style processor, as PySpark's ``GroupedData.transformWithState`` does; its names, its places.

        The grouped DataFrame is a stream; or a batch one, whose state begins empty and ends with the query. Then
        nothing is stored, the state of a partition must fit its worker's memory, and the operator is not one of the
        streaming query's. As in Spark, timers of processing time that are due when the query begins fire once, behind
        the rows, and those of event time never. A null in a grouping column is a key like any other.

        Args:
            statefulProcessor: PySpark's own class, unchanged: ``handleInputRows`` gets and returns iterators of
                ``Row``. Called once per key and micro-batch with all of the key's rows; Spark promises no order among
                them.
            outputStructType: Schema of what it returns.
            outputMode: ``append`` or ``update``, in any case: what the sink is promised. Of a batch query also
                ``complete``.
            timeMode: ``none``, ``processingTime`` or ``eventTime``, in any case. The watermark is that of the rows that
                reach the operator; where their only event-time column is a window, it follows the windows' starts.
            initialState: A batch DataFrame with the grouping columns, or grouped by them: each of its rows is given to
                ``handleInitialState`` once, in the query's first batch, before its key's input. A
                query that has begun may go on without, and takes none where it had none.
            eventTimeColumnName: The output's event-time column. The watermark that the operator goes by is passed on
                with it, to one of Spark's operators or of ours; a row at or before the watermark of the batch before is
                refused, as in Spark, since what follows would drop it as late.
            operator: ``tick``, ``name``, ``parallelism`` and ``broadcast``; see :class:`ProcessorArguments`.

        Returns:
            A DataFrame, streaming as the grouped one is, that any sink can write.

        Raises:
            Invalid: A column does not exist, a type is not supported, or a name is taken: refused here, not in a task.
        """
        names = initialState, eventTimeColumnName
        call = TransformCall(statefulProcessor, outputStructType, outputMode, timeMode, *names)
        return self._processed("row", call, **operator)

    @with_signature_of(transformWithState)
    def transformWithStateInPandas(self, *arguments: Any, **named: Any) -> DataFrame:
        """Run a pandas-style processor: ``handleInputRows`` gets and returns iterators of ``DataFrame``.

        Otherwise as :meth:`transformWithState`.
        """
        operator = {name: named.pop(name) for name in ProcessorArguments.__annotations__ if name in named}
        return self._processed("pandas", TransformCall(*arguments, **named), **operator)

    def applyInPandasWithState(
        self,
        func: GroupFunction,
        outputStructType: StructType | str,
        stateStructType: StructType | str,
        outputMode: OutputModeName,
        timeoutConf: str,
        initialState: GroupedData | DataFrame | None = None,
        **operator: Unpack[ProcessorArguments],
    ) -> DataFrame:
        """Run a function over each key's frames and state, as PySpark's ``GroupedData.applyInPandasWithState`` does.

        The function is given PySpark's own ``GroupState``. Timeouts of processing time come with the next batch with
        data of any key, or with ``tick``.

        Args:
            func: Called with a key, its frames and its state; yields frames.
            outputStructType: Schema of what it yields.
            stateStructType: Schema of the state.
            outputMode: ``append`` or ``update``, in any case.
            timeoutConf: One of PySpark's ``GroupStateTimeout``.
            initialState: As of :meth:`transformWithState`: the state's columns beside the key's, and the key's timeout
                in ``timeoutTimestamp``, as Spark's reader of state has them.
            operator: ``tick``, ``name``, ``parallelism`` and ``broadcast``; see :class:`ProcessorArguments`.

        Raises:
            Invalid: As :meth:`transformWithState`.
        """
        mode = TIME_MODES.get(timeoutConf)
        if mode is None:
            raise Invalid(f"timeoutConf={brief(timeoutConf)} is not one of {', '.join(TIME_MODES)}")
        schema = DeclaredSchemas(parse_ddl).schema(stateStructType, "the state schema")
        processor = GroupStateProcessor(func, schema, timeoutConf)
        call = TransformCall(processor, outputStructType, outputMode, mode, initialState)
        return self._processed("pandas", call, **operator)

    def _processed(
        self,
        style: Style,
        call: TransformCall,
        *,
        tick: str | None = None,
        broadcast: Mapping[str, DataFrame] | None = None,
        name: str | None = None,
        parallelism: int | None = None,
    ) -> DataFrame:
        df = self._df
        place = self._host.place_of(name, self._names(), parallelism)
        definition = define_processor(df, place, style, call, broadcast)
        interval = None if tick is None else interval_ms(tick, place.label)
        if interval is not None and not definition.has_timers:
            raise Invalid(f"{place.label}: tick={tick!r} serves timers, and time mode none has no timers")
        initial = None if call.initialState is None else check_initial_state(call.initialState, definition)
        if not df.isStreaming:
            if tick is not None:
                raise Invalid(
                    f"{place.label}: tick={tick!r} makes batches of a stream, which the DataFrame is not: leave it out"
                )
            return batch_query(df, definition, initial, broadcast or {})
        keyed = keyed_input(df, definition)
        if initial is not None:
            keyed = with_initial_state(keyed, initial, definition)
        if interval is not None:
            keyed = with_ticks(keyed, interval)
        if definition.needs_marks:
            keyed = with_marks(keyed, definition.parallelism)
        if definition.operator.streams:
            keyed = with_broadcast(keyed, broadcast or {}, definition)
        output_df = self._host.run(keyed, definition)
        emitted = definition.operator.emitted_time
        if emitted is not None and definition.event_time is not None:
            return passed_on(output_df, emitted, definition.event_time)
        return output_df

    def mapStates(
        self,
        func: StatesFunction,
        outputStructType: StructType | str,
        stateStructType: StructType | str,
        *,
        ttlDurationMs: int | None = None,
        name: str | None = None,
        parallelism: int | None = None,
    ) -> DataFrame:
        """Update the states of many keys at once with a function over Arrow tables; PySpark has nothing like it.

        ``func(rows, keys, states)`` returns ``(new_states, output)``, where all are ``pyarrow.Table`` s:

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
            func: The function; it is shipped to the workers.
            outputStructType: Columns of the output.
            stateStructType: Columns of a key's state. At a restart they can be removed, reordered and widened, and
                columns that may be null can be added.
            ttlDurationMs: Milliseconds of processing time at which a state is gone that no call has returned since.
                Every returned state is then written, changed or not. By default states live for ever.
            name: The operator's name, under which its state is found at a restart.
            parallelism: Partitions; by default the backend's.

        Returns:
            A streaming DataFrame that any sink can write.

        Raises:
            Invalid: A column does not exist, a type is not supported, a name is taken, or the function does not take
                three arguments: refused here, not in a task.
        """
        place = self._host.place_of(name, self._names(), parallelism)
        definition = define_map_states(self._df, place, func, outputStructType, stateStructType, ttlDurationMs)
        return self._host.run(keyed_input(self._df, definition), definition)

    def _names(self) -> list[str]:
        """Return the grouping columns' names.

        Raises:
            Invalid: One is an expression.
        """
        return [self._name_of(each) for each in self._by]

    def _name_of(self, one: str | Column) -> str:
        if isinstance(one, str) and one in self._df.columns:
            return one
        name = _column_name(self._df, one)
        if not name and isinstance(one, Column):
            raise Invalid(
                f"groupBy({one!r}) is not a column of the stream, which the key of a state must be: add it with "
                "withColumn() and group by its name"
            )
        return name or str(one)  # that there is no such column is said with those that there are


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
        name = _column_name(df, one)
        # By such a name Spark would look for a nested field, or not know what is quoted.
        return one if not name or "." in name or "`" in name else name
    raise Invalid(f"groupBy({one!r}) is neither a column of the stream nor an expression")


def _column_name(df: DataFrame, one: str | Column) -> str:
    """Return the name of the column that Spark finds by this; empty for a nested field, an alias and all else."""
    try:
        selected = df.select(one)
    except PySparkException:
        return ""  # a session window, say: an aggregation by it says what is wrong
    plan = selected._jdf.queryExecution().analyzed()
    is_column = plan.nodeName() == "Project" and plan.projectList().head().nodeName() == "AttributeReference"
    name = str(selected.columns[0])
    return name if is_column and len(selected.columns) == 1 and name in df.columns else ""
