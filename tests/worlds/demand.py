"""Materializations at once, for tests and benchmarks that need a base now."""

from materializer.manager import PeriodicMaterializationManager


def demand(manager: PeriodicMaterializationManager) -> None:
    """Let every operator that has any log be materialized as soon as it can be, whatever its trigger says."""
    manager.look()  # each has a trigger from now on
    for trigger in manager._triggers.values():
        trigger._interval_due = trigger._not_before = 0.0
    manager.look()
