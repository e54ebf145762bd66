"""Deterministic simulation: one seed is one schedule of drivers, TaskManagers, tasks and faults, in virtual time.

The code is the product's own: coordinator, manifest log, cleaner, TaskManager, changelog, uploader, the task and its
state client, over simulated sockets and a simulated store. The auditor checks the invariants at every step.
"""

from tests.simulation.audit import Violation
from tests.simulation.faults import FaultKind, FaultPlan
from tests.simulation.runner import SeedResult, run_seed
from tests.simulation.seeds import Summary, run_seeds

__all__ = ["FaultKind", "FaultPlan", "SeedResult", "Summary", "Violation", "run_seed", "run_seeds"]
