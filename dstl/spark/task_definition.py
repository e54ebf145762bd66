"""The part of an operator's definition that its tasks and the coordinator ask for, whatever kind of operator it is."""

from __future__ import annotations

import copy
import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

import pyarrow as pa

from dstl.state.registry import StateRegistry
from dstl.state.stateful_operator import StatefulOperator
from dstl.state.task_input import TaskInput

if TYPE_CHECKING:
    # A worker has no use for it.
    from dstl.checkpoint.service import CoordinatorService


class EventTime(NamedTuple):
    """The event time of an operator's input.

    Attributes:
        column: Its column.
        delay_ms: How far the watermark stays behind the latest time, in milliseconds.
        follows: Whose watermark it is, where it was passed on: that of an ``operator`` of ours before this one, or
            ``spark``'s; None where the operator makes its own.
    """

    column: str
    delay_ms: int
    follows: Literal["operator", "spark"] | None = None

    @property
    def own_delay_ms(self) -> int | None:
        """The delay of the operator's own watermark; None where it goes by another's."""
        return self.delay_ms if self.follows is None else None


@dataclass(frozen=True, kw_only=True)
class OperatorPlace:
    """An operator's name and the partitioning of its input.

    Attributes:
        uid: Its name, stable over restarts.
        by: Grouping columns.
        parallelism: Partitions.
        max_parallelism: Key groups.
    """

    uid: str
    by: tuple[str, ...]
    parallelism: int
    max_parallelism: int

    @property
    def label(self) -> str:
        """The operator as messages name it."""
        return f"operator {self.uid!r}"


class TaskRunner(Protocol):
    """Runs one task of an operator, once.

    A copy (:func:`copy.copy`) of one that has not run runs another task, and shares with it what does not change.
    """

    @property
    def max_event_time_ms(self) -> int | None:
        """Latest event time of the input so far, milliseconds since 1970; None without one."""

    @property
    def late_rows(self) -> int:
        """Rows dropped because they were at or before the watermark."""

    def run(self, batches: Iterator[pa.RecordBatch], task: TaskInput, /) -> Iterator[pa.RecordBatch]:
        """Process one batch of one partition and yield its output.

        Raises:
            UserCodeError: The user's code raised.
            DstlError: Prior state cannot be read, or changes not sent.
        """


@dataclass(frozen=True, kw_only=True)
class TaskDefinition(OperatorPlace, ABC):
    """One stateful operator: checked when the query is defined, pickled into every task.

    Attributes:
        operator: What its tasks run.
        event_time: The input's event time; None without one, or where nothing goes by it.
        has_initial_state: Rows of initial state are among those of the first batch.
        placed_by: Columns of the input whose hash is a row's key group; empty for the grouping columns.
    """

    operator: StatefulOperator
    event_time: EventTime | None = None
    has_initial_state: bool = False
    placed_by: tuple[str, ...] = ()

    @property
    def key_types(self) -> str:
        """The grouping columns' Spark types, joined by commas."""
        return ",".join(field.dataType.simpleString() for field in self.operator.key_schema.fields)

    @property
    def needs_marks(self) -> bool:
        """True where a task must know its partition even without rows."""
        return self.has_initial_state

    @property
    def needs_watermark_batches(self) -> bool:
        """True where a batch is due when the operator's watermark has moved, also without rows.

        What follows an operator of ours has those of that one.
        """
        return self.event_time is not None and self.event_time.follows != "operator"

    def resolve(self, known: Mapping[str, Any] | None) -> dict[str, Any]:
        """Return the operator's states, given those of its checkpoint: what every task of a run is given.

        Raises:
            Invalid: A state cannot follow the stored one; names both schemas.
            UserCodeError: The user's code raised.
        """
        stored = StateRegistry.from_wire(dict(known)) if known else StateRegistry(self.operator.key_schema)
        return self.declare(stored).to_wire()

    def declare(self, registry: StateRegistry) -> StateRegistry:
        """Return the registry with the states that the operator declares: those that its runner adds."""
        self.task_runner(registry)
        return registry

    async def announce_to(self, service: CoordinatorService) -> None:
        """Have a coordinator expect the operator's tasks; on the coordinator's loop.

        Raises:
            Invalid: As :meth:`CoordinatorService.expect`.
        """
        from dstl.checkpoint.state_catalogue import ExpectedOperator  # in the driver alone, not in workers

        time = self.event_time
        delay_ms, follows = (time.own_delay_ms, time.follows) if time else (None, None)
        service.expect(
            ExpectedOperator(
                self.uid,
                self.parallelism,
                self.key_types,
                self.resolve,
                delay_ms,
                key_columns=self.by,
                follows=follows,
                has_initial_state=self.has_initial_state,
            )
        )

    def arrange(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yield a task's rows in the order in which its runner takes them: as they came."""
        return (batch for batch in batches if batch.num_rows)

    @abstractmethod
    def task_runner(self, registry: StateRegistry) -> TaskRunner:
        """Return the runner of one task.

        Raises:
            Invalid: A type that is not supported.
        """


class PreparedOperator:
    """Makes the runners of one operator's tasks, which share their codecs and schemas. Not thread-safe.

    Args:
        definition: The operator. Nothing that a task does changes it.

    Attributes:
        definition: The operator.
    """

    def __init__(self, definition: TaskDefinition) -> None:
        self.definition = definition
        self._made: tuple[bytes, TaskRunner] | None = None

    def runner(self, registry: bytes) -> TaskRunner:
        """Return the runner of one task.

        Args:
            registry: The operator's states, as the coordinator has them: the same for all tasks of a run.

        Raises:
            Invalid: A type that is not supported.
            CorruptData: Not a registry.
        """
        if self._made is None or self._made[0] != registry:
            states = StateRegistry.from_wire(json.loads(registry), settled=True)
            self._made = bytes(registry), self.definition.task_runner(states)
        return copy.copy(self._made[1])
