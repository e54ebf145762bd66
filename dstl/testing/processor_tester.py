"""A driver of one ``StatefulProcessor`` in a test: no Spark session, no JVM, no store.

::

    tester = ProcessorTester(Visits(), key="page string", input="page string", output="page string, n long")
    assert tester.process([("a",), ("b",), ("a",)]) == [Row(page="a", n=2), Row(page="b", n=1)]
    assert tester.peek_value("n", "a") == (2,)

It runs the very code that a task runs: state goes through the product's own encoding, so that a value which cannot be
stored fails here as it would in the query. What it has not is Spark: rows come in the order in which they are given,
one task has all keys, and timestamps are in UTC.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import pyarrow as pa
from pyspark.sql.streaming import StatefulProcessor
from pyspark.sql.types import StructType

from dstl.errors import Invalid, brief
from dstl.spark.operators.grouping import group_rows, initial_first
from dstl.state.codec.key_codec import KeyCodec
from dstl.state.descriptor import DeclaredSchemas, StateDescriptor, StateKind
from dstl.state.frames.frame_writer import FrameWriter
from dstl.state.frames.row_reader import python_values, rows_of
from dstl.state.frames.row_writer import RowWriter
from dstl.state.handle import ProcessorHandle, TimeMode, TimeModeName
from dstl.state.keyed_batch import INITIAL_STATE_COLUMN, KEY_GROUP_COLUMN, Style
from dstl.state.list_state import ListState
from dstl.state.map_state import MapState
from dstl.state.overlay import Overlay
from dstl.state.processor_runner import ProcessorOperator, ProcessorRunner, discover_states
from dstl.state.registry import TIMERS, StateRegistry
from dstl.state.task_input import TaskInput
from dstl.state.timers import Timers
from dstl.state.value_state import ValueState
from dstl.taskmanager.reads import TableSource, client_of, nothing_held
from dstl.testing.ddl import parse_ddl
from materializer.tables import HeapStateTable

_NAME = "tested"
_KEY_GROUP = 0
"""All keys are in one, so that they come in the order of their first rows."""

T = TypeVar("T")


class ProcessorTester:
    """Runs a processor batch after batch, and shows and sets its state. Not thread-safe.

    Each call of :meth:`process` is one micro-batch. The processor is copied for each, as it is for each task: what it
    keeps in ``self`` between batches is lost, as it is in a query.

    Args:
        processor: The processor under test.
        key: The grouping columns, which are columns of the input too: a ``StructType``, or text
            (:func:`dstl.testing.ddl.parse_ddl`).
        input: All columns of the input.
        output: The columns that the processor yields.
        time_mode: ``none``, ``processingTime`` or ``eventTime``.
        style: ``row`` for ``transformWithState``, ``pandas`` for ``transformWithStateInPandas``.
        event_time: The column by which rows are late; it needs time mode ``eventTime``.

    Attributes:
        processing_time_ms: The time of the last batch; the first one's is 0 unless it is set before.
        watermark_ms: The watermark of the last batch, 0 before there is one.
        late_rows: Rows that the last batch dropped, for they were at or before the watermark.

    Raises:
        Invalid: A schema or mode that cannot be used.
        UserCodeError: ``init`` or ``close`` raised.
    """

    def __init__(
        self,
        processor: StatefulProcessor,
        *,
        key: StructType | str,
        input: StructType | str,
        output: StructType | str,
        time_mode: TimeModeName = "none",
        style: Style = "row",
        event_time: str | None = None,
    ) -> None:
        self._schemas = DeclaredSchemas(parse_ddl)
        self._input = self._schemas.schema(input, "the input schema")
        self._output = self._schemas.schema(output, "the output schema")
        key_schema = self._schemas.schema(key, "the key's schema")
        for name in (*key_schema.names, *([] if event_time is None else [event_time])):
            if name not in self._input.names:
                raise Invalid(f"there is no column {name!r} in the input; there are {', '.join(self._input.names)}")
        if event_time is not None and TimeMode.parse(time_mode) is not TimeMode.EVENT_TIME:
            raise Invalid(f"rows are late in time mode eventTime alone; this one is {time_mode!r}")
        self._keys = KeyCodec(key_schema)
        self._operator = ProcessorOperator(
            name=_NAME,
            key_schema=key_schema,
            input_schema=self._input,
            output_schema=self._output,
            style=style,
            time_mode=time_mode,
            event_time=event_time,
        )
        self._held = TableSource(HeapStateTable())
        self._source = client_of(self._held)
        self._stored = StateRegistry(key_schema).to_wire()
        self._batch = 0
        self.processing_time_ms = 0
        self.watermark_ms = 0
        self.late_rows = 0
        self.upgrade(processor)

    def process(self, rows: Any, *, initial_state: Iterable[Any] = (), initial_schema: StructType | str = "") -> Any:
        """Run one micro-batch, and return what it gave.

        Due timers fire after the rows, as in a query.

        Args:
            rows: Of any keys: ``Row`` objects, dicts, or tuples in the order of the columns; or a pandas DataFrame.
            initial_state: Rows for ``handleInitialState``, which has them before the key's own rows.
            initial_schema: Their columns, the grouping columns among them.

        Returns:
            A list of ``Row``; of a pandas-style processor a DataFrame.

        Raises:
            UserCodeError: The processor raised: the state is as before the call.
            Invalid: Something is not a row of its schema.
        """
        batches = list(self._batches(rows, initial_state, initial_schema))
        registry = StateRegistry.from_wire(self._stored, settled=True)
        runner = ProcessorRunner(copy.deepcopy(self._processor), self._operator, registry, self._schemas)
        changes: list[pa.RecordBatch] = []
        self._batch += 1
        found = list(runner.run(iter(batches), self._task(changes.append)))
        # Only now: a batch that fails has changed nothing.
        for part in changes:
            self._held.apply(part)
        self.late_rows = runner.late_rows
        if self._operator.style == "pandas":
            return pa.Table.from_batches(found, FrameWriter(self._output, _NAME).schema).to_pandas()
        names = tuple(self._output.names)
        return [row for batch in found for row in rows_of(names, [python_values(each) for each in batch.columns])]

    def set_processing_time(self, milliseconds: int) -> Any:
        """Let time pass: run a batch without rows at this time, and return what timers that are due have given.

        Raises:
            Invalid: Time would go back.
        """
        if milliseconds < self.processing_time_ms:
            raise Invalid(f"processing time is {self.processing_time_ms} and cannot go back to {milliseconds}")
        self.processing_time_ms = milliseconds
        return self.process([])

    def set_watermark(self, milliseconds: int) -> Any:
        """Move the watermark: run a batch without rows, and return what timers that are due have given.

        Raises:
            Invalid: The watermark would fall.
        """
        if milliseconds < self.watermark_ms:
            raise Invalid(f"the watermark is {self.watermark_ms} and cannot fall to {milliseconds}")
        self.watermark_ms = milliseconds
        return self.process([])

    def upgrade(self, processor: StatefulProcessor) -> None:
        """Go on with another version of the processor over the same state, as a restarted query does.

        Raises:
            UserCodeError: A state cannot follow the stored one; names both schemas.
        """
        registry = StateRegistry.from_wire(self._stored)
        made = copy.deepcopy(processor)
        discover_states(made, self._operator, registry, self._schemas, nothing_held())
        self._processor = processor
        self._stored = registry.to_wire()

    def peek_value(self, state: str, key: Any) -> tuple[Any, ...] | None:
        """Return the value of a key; None where there is none, or its time to live has passed.

        Args:
            state: A value, reducing or aggregating state.
            key: The grouping key: a tuple; of one column also the bare value.
        """
        value: tuple[Any, ...] | None = self._on(state, key, ValueState, lambda found: found.get())
        return value

    def peek_list(self, state: str, key: Any) -> list[tuple[Any, ...]]:
        """Return the elements of a key's list, in their order."""
        return self._on(state, key, ListState, lambda found: list(found.get()))

    def peek_map(self, state: str, key: Any) -> dict[tuple[Any, ...], tuple[Any, ...]]:
        """Return the entries of a key's map."""
        return self._on(state, key, MapState, lambda found: dict(found.iterator()))

    def peek_timers(self, key: Any) -> list[int]:
        """Return a key's timers, milliseconds since 1970, the earliest first."""
        return self._on(TIMERS, key, Timers, lambda found: list(found.of_key()))

    def update_value(self, state: str, key: Any, value: tuple[Any, ...]) -> None:
        """Set the value of a key."""
        self._on(state, key, ValueState, lambda found: found.update(value))

    def update_list(self, state: str, key: Any, elements: Sequence[tuple[Any, ...]]) -> None:
        """Set a key's list."""
        self._on(state, key, ListState, lambda found: found.put(elements))

    def update_map(self, state: str, key: Any, entries: dict[Any, tuple[Any, ...]]) -> None:
        """Set a key's map."""

        def put(found: MapState) -> None:
            found.clear()
            for user_key, value in entries.items():
                found.updateValue(user_key, value)

        self._on(state, key, MapState, put)

    def delete(self, state: str, key: Any) -> None:
        """Remove what a state has for a key, of whatever kind it is."""
        self._on(state, key, (ValueState, ListState, MapState), lambda found: found.clear())

    def _task(self, send: Callable[[pa.RecordBatch], None]) -> TaskInput:
        groups = (_KEY_GROUP,)
        return TaskInput(self._source, send, self._batch, groups, self.processing_time_ms, self.watermark_ms)

    def _batches(self, rows: Any, initial: Iterable[Any], schema: StructType | str) -> Iterator[pa.RecordBatch]:
        columns = self._input
        given = [self._arrow(rows, columns)]
        held = list(initial)
        if held:
            state = self._schemas.schema(schema, "the initial state's schema")
            carried = self._arrow(held, state)
            struct = carried.to_struct_array()
            empty = [pa.nulls(len(held), field.type) for field in given[0].schema]
            own = [
                carried.column(name) if name in self._keys.names else empty[at] for at, name in enumerate(columns.names)
            ]
            given = [
                pa.RecordBatch.from_arrays([*own, struct], [*columns.names, INITIAL_STATE_COLUMN]),
                given[0].append_column(INITIAL_STATE_COLUMN, pa.nulls(given[0].num_rows, struct.type)),
            ]
        numbered = [
            each.append_column(KEY_GROUP_COLUMN, pa.array([_KEY_GROUP] * each.num_rows, pa.int32()))
            for each in given
            if each.num_rows
        ]
        return group_rows(initial_first(numbered) if held else numbered, self._keys.names)

    def _arrow(self, rows: Any, schema: StructType) -> pa.RecordBatch:
        if hasattr(rows, "to_dict") and hasattr(rows, "columns"):
            return pa.RecordBatch.from_pandas(rows, RowWriter(schema, _NAME).schema, preserve_index=False)
        try:
            return RowWriter(schema, _NAME).batch(list(rows))
        except Invalid as error:
            raise Invalid(str(error).replace(f"operator {_NAME!r} yielded", "the test gave")) from None

    def _on(self, name: str, key: Any, kinds: type[Any] | tuple[type[Any], ...], do: Callable[[Any], T]) -> T:
        with self._opened(name, key) as found:
            if not isinstance(found, kinds):
                raise Invalid(f"state {name!r} is a {type(found).__name__}: use the method of that kind")
            return do(found)

    @contextmanager
    def _opened(self, name: str, key: Any) -> Iterator[Any]:
        """Yield a state with one key in hand; what is written to it is kept."""
        encoded = self._keys.encode(key if isinstance(key, tuple) else (key,))
        registry, overlay = StateRegistry.from_wire(self._stored), Overlay()
        known = {each.name: each for each in registry.descriptors}
        if name not in known:
            held = ", ".join(sorted(known)) or "none"
            raise Invalid(f"the processor has no state {brief(name)}; it has {held}")
        task, mode = self._task(lambda part: None), TimeMode.parse(self._operator.time_mode)
        handle = ProcessorHandle(registry, mode, task, overlay, self._schemas)
        found = _declared(handle, known[name])
        handle.open_window([encoded], [_KEY_GROUP])
        handle.window.index = 0
        yield found
        handle.close_window()
        for part in overlay.drain():
            self._held.apply(part)


def _declared(handle: ProcessorHandle, descriptor: StateDescriptor) -> Any:
    if descriptor.kind is StateKind.TIMER:
        return handle.timers
    schema, ttl_ms = descriptor.value_schemas[-1], descriptor.ttl_ms or None
    if descriptor.kind is StateKind.LIST:
        return handle.getListState(descriptor.name, schema, ttl_ms)
    if descriptor.kind is StateKind.MAP:
        assert descriptor.user_key is not None
        return handle.getMapState(descriptor.name, descriptor.user_key, schema, ttl_ms)
    return handle.getValueState(descriptor.name, schema, ttl_ms)
