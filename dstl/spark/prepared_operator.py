"""An operator as a worker process keeps it from task to task: what does not change between them is made once."""

from __future__ import annotations

import copy
import json

from dstl.spark.task_definition import TaskDefinition, TaskRunner
from dstl.state.registry import StateRegistry

__all__ = ["PreparedOperator"]


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
