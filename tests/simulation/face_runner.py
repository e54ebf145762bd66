"""One task of an operator of a face: the product's runner, with the faults of a simulated attempt around it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pyarrow as pa

from dstl.spark.task_definition import PreparedOperator, TaskDefinition, TaskRunner
from dstl.state.task_input import TaskInput
from tests.simulation.attempt import Seat
from tests.simulation.clocked_model import Batch
from tests.simulation.faces import Output, collect_rows
from tests.simulation.user_faces import RAISES

_RAISES = 0.03
"""Share of the attempts in which a service is away that the user's code asks."""


class SeatedOperator(PreparedOperator):
    """Makes the runners of one operator's tasks.

    Args:
        definition: The operator.
        seat: Of the attempt that has the faults.
    """

    def __init__(self, definition: TaskDefinition, seat: Seat) -> None:
        super().__init__(definition)
        self._seat = seat

    def runner(self, registry: bytes) -> TaskRunner:
        """Return the runner of one task."""
        return _Runner(super().runner(registry), self._seat)


class _Runner:
    """The product's runner, which tells the auditor what it has yielded.

    Args:
        runner: It.
        seat: Of the attempt that has the faults.
    """

    def __init__(self, runner: TaskRunner, seat: Seat) -> None:
        self._runner = runner
        self._seat = seat

    @property
    def max_event_time_ms(self) -> int | None:
        """Latest event time of the input so far, Unix milliseconds."""
        return self._runner.max_event_time_ms

    @property
    def late_rows(self) -> int:
        """Rows dropped as late."""
        return self._runner.late_rows

    def run(self, batches: Iterator[pa.RecordBatch], task: TaskInput, /) -> Iterator[pa.RecordBatch]:
        """Process a batch, or fail where the attempt does."""
        attempt = self._seat.attempt
        attempt.fail_at(3)
        output: Output = {}
        if not attempt.world.plan.healed and attempt.rng.random() < _RAISES:
            RAISES.set(True)
        try:
            for batch in self._runner.run(batches, task):
                collect_rows(batch, output)
                yield batch
        finally:
            RAISES.set(False)
        attempt.fail_at(4)
        given = Batch(task.processing_time_ms, task.watermark_ms, task.late_watermark_ms or 0)
        attempt.world.check.face_output(attempt.spec, attempt.parent, given, output)
        attempt.wait(asyncio.sleep(attempt.rng.uniform(0.0, 0.01)))
