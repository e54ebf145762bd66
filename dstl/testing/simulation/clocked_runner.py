"""One task of an operator with clocks: the product's runner, with the faults of a simulated attempt around it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pyarrow as pa

from dstl.state.processor_runner import ProcessorRunner
from dstl.state.task_input import TaskInput
from dstl.testing.simulation.attempt import SimulatedAttempt
from dstl.testing.simulation.blocking import Wait
from dstl.testing.simulation.clocked_model import Batch
from dstl.testing.simulation.clocked_operator import collect_output

__all__ = ["ClockedRunner"]


class ClockedRunner:
    """The product's runner, which tells the auditor what it has yielded.

    Args:
        runner: It.
        attempt: Has the faults.
        wait: Waits on the simulated loop.
    """

    def __init__(self, runner: ProcessorRunner, attempt: SimulatedAttempt, wait: Wait) -> None:
        self._runner = runner
        self._attempt = attempt
        self._wait = wait

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
        attempt = self._attempt
        attempt.fail_at(3)
        output: dict[bytes, list[str]] = {}
        for batch in self._runner.run(batches, task):
            collect_output(batch, output)
            yield batch
        attempt.fail_at(4)
        given = Batch(task.processing_time_ms, task.watermark_ms, task.late_watermark_ms or 0)
        attempt.world.check.clocked_output(attempt.spec, attempt.parent, given, output)
        self._wait(asyncio.sleep(attempt.rng.uniform(0.0, 0.01)))
