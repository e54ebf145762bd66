"""The runner of an unchanged PySpark ``StatefulProcessor`` over the sorted batches of one task."""

from __future__ import annotations

import copy
import gc
from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import Any

import pyarrow as pa
from pyspark.sql.streaming.stateful_processor import ExpiredTimerInfo, TimerValues

from dstl.errors import Invalid
from dstl.rpc.state_client import StateClient
from dstl.state.codec.key_codec import KeyCodec
from dstl.state.descriptor import DeclaredSchemas
from dstl.state.frames.frame_writer import FrameWriter
from dstl.state.frames.output_checks import check_emitted
from dstl.state.frames.row_reader import row_class
from dstl.state.frames.row_writer import RowWriter
from dstl.state.handle import ProcessorHandle, TimeMode
from dstl.state.keyed_batch import BatchReader, FrameLimits, KeyedBatch, Style
from dstl.state.overlay import Overlay
from dstl.state.processor_errors import user_code_error
from dstl.state.registry import StateRegistry
from dstl.state.stateful_operator import StatefulOperator
from dstl.state.task_input import TaskInput
from dstl.state.timers import Timer, expiry_ms

_COLLECTOR_THRESHOLDS = (50_000, 20, 50)


def discover_states(
    processor: Any, operator: ProcessorOperator, registry: StateRegistry, schemas: DeclaredSchemas, source: StateClient
) -> StateRegistry:
    """Run ``init`` and ``close`` as Spark does on the driver, to learn which states a processor declares.

    Call it on a copy of the user's processor, when the query is defined.

    Args:
        processor: The copy.
        operator: The operator.
        registry: What the checkpoint knows; empty for a new job. It takes the declarations.
        schemas: Reads the schemas that ``init`` gives as text, and remembers them for the tasks.
        source: What ``init`` finds where it reads state: one that holds nothing.

    Returns:
        The registry, to be stored with checkpoints and given to the tasks (``settled=True``).

    Raises:
        Invalid: A schema that cannot follow the stored one, and the other errors of the handle.
        UserCodeError: ``init`` or ``close`` raised.
    """
    nothing = TaskInput(source, send=lambda part: None, sequence=0, processing_time_ms=0)
    mode = TimeMode.parse(operator.time_mode)
    handle = ProcessorHandle(registry, mode, nothing, Overlay(), schemas, operator.streams)
    try:
        processor.init(handle)
        processor.close()
    except Exception as error:
        raise user_code_error(error, processor, operator.name, None) from error
    return registry


@dataclass(frozen=True, kw_only=True)
class ProcessorOperator(StatefulOperator):
    """An operator that runs a processor. Its key are the grouping columns, which are columns of the input too.

    Attributes:
        name: For messages.
        style: ``"row"`` for ``transformWithState``, ``"pandas"`` for ``transformWithStateInPandas``.
        time_mode: PySpark's name of it, in any case.
        event_time: Column whose maximum is observed; in event time, rows that are late by it are dropped.
        emitted_time: The output's event time; rows that would be late for what follows are refused.
        timezone: The session's time zone, in which naive timestamps of a pandas-style processor's output are.
        frames: How large a pandas-style processor's input frames are.
    """

    name: str
    style: Style = "row"
    time_mode: str = "none"
    event_time: str | None = None
    emitted_time: str | None = None
    timezone: str = "UTC"
    frames: FrameLimits = field(default_factory=FrameLimits)


class ProcessorRunner:
    """Runs one operator's processor in one task.

    Args:
        processor: A ``pyspark.sql.streaming.stateful_processor.StatefulProcessor``, used for one run.
        operator: The operator.
        registry: Its states; takes what ``init`` declares.
        schemas: Reads the schemas that ``init`` gives as text.

    Raises:
        Invalid: A type that cannot be a key, an unknown time mode, an output type that Arrow cannot carry.
    """

    def __init__(
        self, processor: Any, operator: ProcessorOperator, registry: StateRegistry, schemas: DeclaredSchemas
    ) -> None:
        self.registry = registry
        self._processor = processor
        self._operator = operator
        self._keys = KeyCodec(operator.key_schema)
        self._schemas = schemas
        self._mode = TimeMode.parse(operator.time_mode)
        self._writer: RowWriter | FrameWriter
        if operator.style == "pandas":
            self._writer = FrameWriter(operator.output_schema, operator.name, operator.timezone)
        else:
            self._writer = RowWriter(operator.output_schema, operator.name)
        self._reader: BatchReader | None = None
        self._key: Any = None
        self._ours: BaseException | None = None

    def __copy__(self) -> ProcessorRunner:
        """Return a runner of another task, with a processor of its own."""
        made = object.__new__(type(self))
        made.__dict__.update(self.__dict__)
        made._processor = copy.deepcopy(self._processor)
        made.registry = copy.copy(self.registry)
        return made

    @property
    def max_event_time_ms(self) -> int | None:
        """Latest event time of the input so far, milliseconds since 1970; None without one."""
        return self._reader.max_event_time_ms if self._reader else None

    @property
    def late_rows(self) -> int:
        """Rows that were at or before the watermark: dropped, or given to ``handleLateRows``."""
        return self._reader.late_rows if self._reader else 0

    def run(self, batches: Iterator[pa.RecordBatch], task: TaskInput) -> Iterator[pa.RecordBatch]:
        """Process one batch of one partition.

        Args:
            batches: Its rows, sorted by the grouping columns, with the key group column.
            task: Prior state and where changes go.

        Yields:
            Batches of the output schema.

        Raises:
            UserCodeError: The processor raised; nothing more is sent, and what was sent must be dropped.
            Invalid: An emitted row is late for what follows.
            DstlError: Prior state cannot be read, or changes not sent.
        """
        with _fewer_collections():
            for made in self._writer.batches(self._outputs(batches, task)):
                if self._operator.emitted_time is not None:
                    check_emitted(made, self._operator.emitted_time, task.late_until_ms, self._operator.name)
                yield made

    def _outputs(self, batches: Iterator[pa.RecordBatch], task: TaskInput) -> Iterator[list[Any]]:
        self._overlay = Overlay()
        self._task = task
        self._handle = handle = ProcessorHandle(
            self.registry, self._mode, task, self._overlay, self._schemas, self._operator.streams
        )
        late_ms: int | None = None
        if self._mode is TimeMode.EVENT_TIME:
            late_ms = task.late_until_ms
        of, takes_late = self._operator, hasattr(self._processor, "handleLateRows")
        self._reader = BatchReader(self._keys, of.input_schema, of.style, of.event_time, late_ms, of.frames, takes_late)
        self._reader.initial_style = getattr(self._processor, "_dstl_initial_style", of.style)
        self._input = self._reader.read(batches)
        self._peeked: KeyedBatch | None = None
        timed = self._mode is not TimeMode.NONE
        self._times = TimerValues(task.processing_time_ms, task.watermark_ms) if timed else TimerValues(-1, -1)
        try:
            self._processor.init(handle)
            handle.end_init()
            if timed:
                self._begin_timers(handle)
            self._broadcast_phase(handle)
            rows = chain(self._input_rows(), self._late_rows(), self._timer_rows(handle) if timed else ())
            while outputs := list(islice(rows, self._writer.at_once)):
                yield outputs
            self._key = None
            handle.close_window()
            self._processor.close()
        except Exception as error:
            if error is self._ours:
                raise
            raised = user_code_error(error, self._processor, self._operator.name, self._key)
            if raised is error:
                raise
            raise raised from error
        self._drain()
        with self._not_the_users():
            for part in handle.broadcast.close():
                if task.send_broadcast is not None:
                    task.send_broadcast(part)

    @contextmanager
    def _not_the_users(self) -> Iterator[None]:
        """Let what is raised in the body pass as it is: it is no error of the user's code, which is all around it."""
        try:
            yield
        except Exception as error:
            self._ours = error
            raise

    # The broadcast phase

    def _broadcast_phase(self, handle: ProcessorHandle) -> None:
        scope = handle.broadcast
        for each in self._task.broadcast:
            scope.stream = name = each.stream.name
            yielded = self._processor.handleBroadcastRows(name, each.take(self._operator.style, self._operator.frames))
            # A function with a yield in it does nothing before it is iterated over.
            if yielded is not None and next(iter(yielded), None) is not None:
                raise Invalid(
                    f"handleBroadcastRows yields rows for {name!r}, and every partition would yield them once more: "
                    "keep them in handle.getBroadcastState(name), and yield in handleInputRows or handleExpiredTimer"
                )
        scope.stream = None

    # The input phase

    def _input_rows(self) -> Iterator[Any]:
        batch = self._peek()
        handle_rows, window, times = self._processor.handleInputRows, self._handle.window, self._times
        while batch is not None:
            self._adopt(batch)
            first = 0
            while True:
                # This loop is what a key costs: no more than it must.
                last = len(batch.keys) - 1
                if batch.initial is None:
                    tuples, starts, stops, slices = batch.tuples, batch.starts, batch.stops, batch.slices
                    for at in range(first, last):
                        window.index = at
                        self._key = key = tuples[at]
                        yield from handle_rows(key, slices(starts[at], stops[at]), times)
                else:
                    for at in range(first, last):
                        yield from self._whole_key(batch, at)
                # The last key may go on in the next batches.
                yield from self._whole_key(batch, last, spans=True)
                if self._current is batch or len(self._current.keys) == 1:
                    break
                batch, first = self._current, 1
            batch = self._peek()

    def _whole_key(self, batch: KeyedBatch, at: int, *, spans: bool = False) -> Iterator[Any]:
        """Process one key the general way: with initial state, or over several batches."""
        self._handle.window.index = at
        self._key = key = batch.tuples[at]
        portion: tuple[KeyedBatch, int] | None = (batch, at)
        while portion is not None:
            of, position = portion
            for state in of.initial[position] if of.initial else ():
                self._processor.handleInitialState(key, state, self._times)
            if of.starts[position] < of.stops[position]:
                break
            portion = self._continue() if spans else None
        if portion is not None:
            rows = self._rows_across_batches(*portion) if spans else batch.slices(batch.starts[at], batch.stops[at])
            yield from self._processor.handleInputRows(key, rows, self._times)
            if spans:
                while self._continue() is not None:
                    pass  # rows that the processor did not take

    def _late_rows(self) -> Iterator[Any]:
        assert self._reader is not None
        for batch in self._reader.read_late():
            self._open(batch.keys, batch.key_groups)
            for at, key in enumerate(batch.tuples):
                self._handle.window.index, self._key = at, key
                rows = batch.slices(batch.starts[at], batch.stops[at])
                yield from self._processor.handleLateRows(key, rows, self._times)

    def _rows_across_batches(self, batch: KeyedBatch, at: int) -> Iterator[Any]:
        portion: tuple[KeyedBatch, int] | None = (batch, at)
        while portion is not None:
            of, position = portion
            yield from of.slices(of.starts[position], of.stops[position])
            portion = self._continue()

    def _continue(self) -> tuple[KeyedBatch, int] | None:
        """Take the next batch in hand if it goes on with the current key and the current batch is at its end."""
        if self._handle.window.index != len(self._current.keys) - 1:
            return None
        following = self._peek()
        if following is None or following.keys[0] != self._current.keys[-1]:
            return None
        self._adopt(following, goes_on=True)
        self._handle.window.index = 0
        return following, 0

    def _peek(self) -> KeyedBatch | None:
        if self._peeked is None:
            with self._not_the_users():
                self._peeked = next(self._input, None)
        return self._peeked

    def _adopt(self, batch: KeyedBatch, *, goes_on: bool = False) -> None:
        self._peeked = None
        self._current = batch
        self._open(batch.keys, batch.key_groups, frozenset(batch.keys[:1]) if goes_on else frozenset())

    def _open(self, keys: list[bytes], key_groups: list[int], held: frozenset[bytes] = frozenset()) -> None:
        """Take other keys in hand; what was written for those before may be sent, but for those that are held."""
        with self._not_the_users():
            self._handle.close_window()
            if self._overlay.nbytes >= self._task.part_bytes:
                assert self._reader is not None
                timers = self._handle.timers
                held = held | self._reader.late_keys  # their late rows come behind all others
                self._drain(held | timers.awaited if timers is not None else held)
            self._handle.open_window(keys, key_groups)

    # The timer phase

    def _begin_timers(self, handle: ProcessorHandle) -> None:
        assert handle.timers is not None
        of_event_time = self._mode is TimeMode.EVENT_TIME
        until = self._task.watermark_ms if of_event_time else self._task.processing_time_ms
        with self._not_the_users():
            handle.timers.begin(until, self._task.key_groups)

    def _timer_rows(self, handle: ProcessorHandle) -> Iterator[Any]:
        handle.close_window()
        timers = handle.timers
        assert timers is not None
        make_key = row_class(tuple(self._keys.names))
        handle.window.forward = False
        for page in timers.due():
            positions = self._take_page(page)
            keys = [tuple.__new__(make_key, self._keys.decode(key)) for key in positions]
            for _, key, user_key in page:
                handle.window.index = at = positions[key]
                self._key = keys[at]
                expiry = expiry_ms(user_key)
                yield from self._processor.handleExpiredTimer(
                    key=keys[at], timerValues=self._times, expiredTimerInfo=ExpiredTimerInfo(expiry)
                )
                timers.delete(expiry)

    def _take_page(self, page: list[Timer]) -> dict[bytes, int]:
        key_groups = {key: key_group for key_group, key, _ in page}
        self._open(list(key_groups), list(key_groups.values()))
        return {key: i for i, key in enumerate(key_groups)}

    def _drain(self, held: AbstractSet[bytes] = frozenset()) -> None:
        with self._not_the_users():
            for part in self._overlay.drain(held):
                self._task.send(part)


@contextmanager
def _fewer_collections() -> Iterator[None]:
    """Have cycles looked for less often until the end: rows and keys of a batch are many objects, without cycles."""
    before = gc.get_threshold()
    if 0 < before[0] < _COLLECTOR_THRESHOLDS[0]:
        gc.set_threshold(*_COLLECTOR_THRESHOLDS)
    try:
        yield
    finally:
        gc.set_threshold(*before)
