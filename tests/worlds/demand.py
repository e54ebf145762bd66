"""Materializations at once, for tests and benchmarks that need a base now."""

from typing import Any


def demand(manager: Any) -> None:
    """Let a manager materialize every operator that has any log as soon as it can, whatever its trigger says."""
    manager.look()  # each has a trigger from now on
    for trigger in manager._triggers.values():
        trigger._interval_due = trigger._not_before = 0.0
    manager.look()
