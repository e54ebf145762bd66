"""The number of TaskManagers by the slots of tasks: a TaskManager is one process, whose loop is one core."""

from __future__ import annotations

__all__ = ["SLOTS_OF_A_TASK_MANAGER", "task_managers_of"]

SLOTS_OF_A_TASK_MANAGER = 8
"""Busy slots that one TaskManager serves: a little fewer than those by which its core is full (DESIGN 13.29)."""


def task_managers_of(slots: int) -> int:
    """Return how many TaskManagers a host has that runs so many tasks at once."""
    return max(1, -(-slots // SLOTS_OF_A_TASK_MANAGER))
