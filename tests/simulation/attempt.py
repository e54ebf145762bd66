"""One task attempt of a simulated query: the faults that happen to it, and what the auditor hears of it."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

import pyarrow as pa

from dstl.errors import Unavailable
from dstl.spark.task_definition import TaskDefinition
from handles.key_group import range_of_partition
from tests.simulation.blocking import Wait
from tests.simulation.face_input import broadcast_rows, input_mark, input_rows
from tests.simulation.faults import FaultKind
from tests.simulation.spark import TaskSpec, first_keys, key_group_of
from tests.simulation.world import World


class SimulatedAttempt:
    """One attempt, as its worker and its processor see it.

    Attributes:
        spec: Its identity and its rows.
        differs: Its changes are not a function of its rows.
        parent: The checkpoint that it builds on; None for an empty state.
        changes: What it has written.
        wait: Waits on the simulated loop.
    """

    def __init__(self, world: World, spec: TaskSpec, rng: random.Random, wait: Wait) -> None:
        self.spec = spec
        self.wait = wait
        self.parent: int | None = None
        self.changes: list[pa.RecordBatch] = []
        self.world = world
        self.rng = rng
        self._failing = rng.randrange(1, 6) if self.has_fault(FaultKind.TASK_FAILURE, count=False) else 0
        self.differs = self.has_fault(FaultKind.CHANGING_OUTPUT)
        if self.differs:
            world.check.changing(spec)

    def has_fault(self, kind: FaultKind, *, count: bool = True) -> bool:
        """Draw whether one of Spark's faults happens here."""
        happens = self.world.plan.task_fault(self.rng, kind)
        if happens and count:
            self.world.count(kind)
        return happens

    def fail_at(self, step: int) -> None:
        """Fail here, if the attempt is to fail at this step: 1 before it begins, 2 after, 3 before it reads, 4 after
        it has written, 5 before it acknowledges."""
        if step == self._failing:
            self.world.count(FaultKind.TASK_FAILURE)
            raise Unavailable(f"the task failed at step {step} (simulated)")

    def rows(self, definition: TaskDefinition) -> Iterator[pa.RecordBatch]:
        """Yield the rows of its partition, as Spark's shuffle delivers them: keys in any order, rules behind them.

        Args:
            definition: Its operator.
        """
        self.fail_at(1)
        operations = self.spec.operations
        keys = list(operations)
        if keys and self.has_fault(FaultKind.REORDERED_ROWS):
            self.rng.shuffle(keys)
        if definition.needs_marks:
            yield input_mark(definition, self.spec.slot)
        initial = self.initial() if definition.has_initial_state else []
        if keys or initial:
            yield input_rows(definition, {key: operations[key] for key in keys}, initial)
        rules = list(self.spec.rules) if definition.operator.streams else []
        if rules and self.has_fault(FaultKind.REORDERED_ROWS):
            self.rng.shuffle(rules)
        if rules:
            yield broadcast_rows(definition, self.spec.slot, rules)

    def initial(self) -> list[bytes]:
        """Return the keys of its partition that begin with a state: those of a query's first batch."""
        logs, spec = self.world.logs, self.spec
        owned = range_of_partition(spec.slot, logs.max_parallelism, spec.parallelism)
        return [key for key in first_keys(logs, spec.batch) if key_group_of(key, logs.max_parallelism) in owned]

    def parts(self, count: int) -> list[slice]:
        """Return in which parts it sends its changes of so many keys: one, or two."""
        cut = self.rng.randrange(1, count) if count > 1 and self.rng.random() < 0.3 else count
        return [part for part in (slice(0, cut), slice(cut, count)) if part.start < part.stop]


@dataclass(eq=False)
class Seat:
    """The place of a worker's one task at a time: what is prepared for all of them finds the current one there."""

    attempt: SimulatedAttempt
