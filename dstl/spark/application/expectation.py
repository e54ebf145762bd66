"""The coordinator's expectation of an operator, told when the operator is defined."""

from __future__ import annotations

from dstl.checkpoint.service import CoordinatorService
from dstl.spark.task_definition import TaskDefinition

__all__ = ["expect"]


async def expect(service: CoordinatorService, definition: TaskDefinition) -> None:
    """Have a coordinator expect an operator's tasks; on the coordinator's loop.

    Raises:
        Invalid: As :meth:`CoordinatorService.expect`.
    """
    time = definition.event_time
    service.expect(
        definition.uid,
        definition.parallelism,
        definition.key_types,
        definition.resolve,
        time.own_delay_ms if time else None,
        definition.by,
        time.follows if time else None,
    )
