"""Deterministic simulation: one seed is one schedule of drivers, TaskManagers, tasks and faults, in virtual time.

What runs is the real code: coordinator, manifest log, cleaner, TaskManager, changelog and uploader, over simulated
sockets and a simulated store. The auditor checks the invariants at every step.
"""

from dstl.testing.simulation.audit import Violation
from dstl.testing.simulation.faults import FaultKind, FaultPlan
from dstl.testing.simulation.runner import SeedResult, Summary, run_seed, run_seeds

__all__ = ["FaultKind", "FaultPlan", "SeedResult", "Summary", "Violation", "run_seed", "run_seeds"]
