"""The faults of a simulated world, and how many of them happen in one seed."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from tests.simulation.faulty_store import Fault


class FaultKind(StrEnum):
    """Every fault; the value is its name in reports."""

    # The store; those of a faulty store are called as there.
    SLOW_DOWN = f"store-{Fault.SLOW_DOWN}"
    UNAVAILABLE = f"store-{Fault.UNAVAILABLE}"
    RESET = f"store-{Fault.RESET}"
    LOST_RESPONSE = f"store-{Fault.LOST_RESPONSE}"
    STORED_SLOW_DOWN = f"store-{Fault.STORED_SLOW_DOWN}"
    LATE_PUT = f"store-{Fault.LATE_PUT}"
    LATE_AFTER_CANCEL = "store-late-put-after-cancel"
    LATE_AFTER_DEATH = "store-put-of-a-dead-process"
    SLOW = f"store-{Fault.SLOW}"
    OTHER_ORDER = f"store-{Fault.OTHER_ORDER}"
    STUCK = f"store-{Fault.STUCK}"
    STALE_LIST = f"store-{Fault.STALE_LIST}"
    SHORT_GET = f"store-{Fault.SHORT_GET}"
    PARTIAL_DELETE = f"store-{Fault.PARTIAL_DELETE}"
    OUTAGE = "store-outage"
    FULL = f"store-{Fault.FULL}"
    DAMAGED_BASE = "store-damaged-base"
    DAMAGED_SEGMENT = "store-damaged-segment"
    # The TaskManagers' local disk.
    LOCAL_FULL = "local-disk-full"
    LOCAL_FULL_IN_BASE = "local-disk-full-during-a-base"
    LOCAL_ERROR = "local-disk-error"
    HOST_RESTART = "host-restart-without-what-was-not-synced"
    MEMORY_FULL = "no-memory-left"
    # Network.
    CONNECTION_RESET = "connection-reset"
    PARTITION = "partition"
    # Processes.
    DRIVER_CRASH = "driver-crash"
    DRIVER_PAUSE = "driver-pause"
    LEASE_PAUSE = "driver-pause-longer-than-every-lease"
    SECOND_DRIVER = "second-driver"
    TASK_MANAGER_CRASH = "task-manager-crash"
    TASK_MANAGER_PAUSE = "task-manager-pause"
    HANG = "task-manager-hangs-for-good"
    TASK_MANAGER_LIVES_ON = "task-manager-lives-on-when-given-up"
    LAUNCH_FAILURE = "task-manager-launch-comes-to-nothing"
    WORKER_CRASH = "worker-crash"
    WORKER_EXIT = "worker-exit-when-its-task-has-ended"
    SAVEPOINT_CRASH = "savepoint-crash"
    WORKER_PAUSE = "worker-pause"
    CLOCK_SKEW = "clock-skew"
    CLOCK_JUMP = "clock-jump"
    CLOCK_YEAR = "clock-a-year-off-and-back"
    # Spark.
    TASK_FAILURE = "task-failure"
    LOST_RESULT = "task-result-lost"
    SPECULATION = "speculative-task"
    SECOND_ACTION = "second-action"
    ABANDONED_STAGE = "abandoned-stage"
    REORDERED_ROWS = "reordered-rows"
    DUPLICATE_ACKNOWLEDGEMENT = "duplicate-acknowledgement"
    STALE_ACKNOWLEDGEMENT = "stale-acknowledgement"
    SECOND_ACTION_BESIDE = "second-action-beside-the-first"
    STAGE_RERUN = "stage-run-again-in-part"
    CONSUMED_IN_PIECES = "output-consumed-in-pieces"
    UNREAD_OUTPUT = "output-read-in-part-or-not-at-all"
    CHANGING_OUTPUT = "changes-that-differ-by-attempt"
    RESTART_IN_DRIVER = "query-restart-in-driver"
    RESCALE = "rescale"


_PER_REQUEST = (
    FaultKind.SLOW_DOWN,
    FaultKind.UNAVAILABLE,
    FaultKind.RESET,
    FaultKind.LOST_RESPONSE,
    FaultKind.LATE_PUT,
    FaultKind.SLOW,
    FaultKind.STUCK,
    FaultKind.STALE_LIST,
    FaultKind.SHORT_GET,
    FaultKind.PARTIAL_DELETE,
)
_OF_COMMITS = (FaultKind.RESET, FaultKind.LOST_RESPONSE, FaultKind.LATE_PUT, FaultKind.STUCK, FaultKind.UNAVAILABLE)
_NEMESIS = (
    FaultKind.OUTAGE,
    FaultKind.CONNECTION_RESET,
    FaultKind.PARTITION,
    FaultKind.DRIVER_CRASH,
    FaultKind.DRIVER_PAUSE,
    FaultKind.SECOND_DRIVER,
    FaultKind.TASK_MANAGER_CRASH,
    FaultKind.TASK_MANAGER_PAUSE,
    FaultKind.WORKER_CRASH,
    FaultKind.WORKER_PAUSE,
)
_PER_TASK = (
    FaultKind.TASK_FAILURE,
    FaultKind.LOST_RESULT,
    FaultKind.SPECULATION,
    FaultKind.SECOND_ACTION,
    FaultKind.ABANDONED_STAGE,
    FaultKind.REORDERED_ROWS,
    FaultKind.DUPLICATE_ACKNOWLEDGEMENT,
    FaultKind.STALE_ACKNOWLEDGEMENT,
)
_LATER = (FaultKind.SECOND_ACTION_BESIDE, FaultKind.STAGE_RERUN, FaultKind.CHANGING_OUTPUT)
"""Drawn last, so that the plans of seeds that were worth keeping stay what they were."""


_LONG_LASTING = {FaultKind.CLOCK_YEAR: 0.6, FaultKind.HANG: 0.4, FaultKind.LEASE_PAUSE: 0.15}
"""With the share of the worlds that have them."""


@dataclass
class Strike:
    """One fault at the n-th step of one kind: to try every n until there is none such finds every place of a fault.

    Attributes:
        where: ``request`` to the store, ``connection`` or ``message`` between processes, or the name of a process,
            whose steps count.
        nth: The step that it happens at, from 1.
        what: What happens: one of the store's faults; a reset, which refuses a connection and breaks it at a message;
            a partition, which holds a message back; a process's crash or pause.
        steps: Steps that there have been.
    """

    where: str
    nth: int
    what: FaultKind
    steps: int = 0

    def hits(self) -> bool:
        """Count a step, and return True where it is the one."""
        self.steps += 1
        return self.steps == self.nth


@dataclass
class FaultPlan:
    """The faults of one seed: a random subset at random strength, for a fault may hide what another would show.

    Attributes:
        per_request: Chance of each store fault, per request that it can happen to.
        per_task: Chance of each of Spark's, per task or stage.
        nemesis: Faults that strike from outside, one now and then.
        nemesis_mean_s: Mean virtual seconds between two of them.
        survives_cancel: Chance that a PUT lands although its caller was cancelled or killed before.
        only: Part of the names whose requests fail; empty for all.
        longest_delay_s: Most seconds by which a late PUT comes late, or a process is stopped.
        saves: Chance that savepoints are made beside the query.
        lives_on: Chance that nobody ends a TaskManager that was given up: it runs on another host, say.
        local_errors: Chance that an access to the TaskManagers' local disk fails.
        full_in_base: Chance that the disk is full from a write of a base on, for a while.
        by_directory: The store lists directory by directory.
        strike: One fault at one step, besides the others.
        healed: Set when the faults are over, for good.
    """

    per_request: Mapping[FaultKind, float] = field(default_factory=dict)
    per_task: Mapping[FaultKind, float] = field(default_factory=dict)
    nemesis: tuple[FaultKind, ...] = ()
    nemesis_mean_s: float = 2.0
    survives_cancel: float = 0.5
    only: str = ""
    longest_delay_s: float = 60.0
    saves: float = 0.2
    lives_on: float = 0.0
    local_errors: float = 0.0
    full_in_base: float = 0.0
    by_directory: bool = False
    strike: Strike | None = None
    healed: bool = False

    def request_fault(self, rng: random.Random, possible: tuple[FaultKind, ...], name: str) -> FaultKind | None:
        """Draw what happens to one request; at most one thing does."""
        strike = None if self.healed else self.strike
        if strike is not None and strike.where == "request" and strike.hits():
            return strike.what if strike.what in possible else None
        if self.healed or not self.per_request or self.only not in name:
            return None
        drawn = rng.random()
        for kind in possible:
            drawn -= self.per_request.get(kind, 0.0)
            if drawn < 0:
                return kind
        return None

    def task_fault(self, rng: random.Random, kind: FaultKind) -> bool:
        """Draw whether one of Spark's faults happens here."""
        chance = self.per_task.get(kind, 0.0)
        return not self.healed and chance > 0 and rng.random() < chance


def draw_plan(rng: random.Random) -> FaultPlan:
    """Return the plan of a seed."""
    if rng.random() < 0.04:
        return FaultPlan()
    strength = rng.choice((0.3, 1.0, 1.0, 2.5))

    def some(kinds: tuple[FaultKind, ...], low: float, high: float) -> dict[FaultKind, float]:
        share = rng.choice((0.3, 0.6, 0.9))
        return {kind: min(0.5, strength * rng.uniform(low, high)) for kind in kinds if rng.random() < share}

    per_request, only = some(_PER_REQUEST, 0.005, 0.06), ""
    if rng.random() < 0.12:
        # The commit protocol alone, as hard as it can be: elsewhere so many faults let nothing get that far.
        per_request = {kind: rng.uniform(0.1, 0.35) for kind in rng.sample(_OF_COMMITS, 2)}
        only = "manifests/"
    plan = FaultPlan(
        per_request=per_request,
        only=only,
        per_task=some(_PER_TASK, 0.02, 0.10),
        nemesis=tuple(kind for kind in _NEMESIS if rng.random() < 0.5),
        nemesis_mean_s=rng.choice((0.5, 1.5, 4.0)),
        survives_cancel=rng.choice((0.1, 0.5, 0.9)),
        longest_delay_s=rng.choice((5.0, 30.0, 90.0)),
    )
    plan.per_task = {**plan.per_task, **some(_LATER, 0.02, 0.10)}
    if rng.random() < 0.3:
        plan.nemesis = (*plan.nemesis, FaultKind.CLOCK_JUMP)
    if rng.random() < 0.2:
        plan.nemesis = (*plan.nemesis, FaultKind.FULL)
    plan.lives_on = rng.choice((0.0, 0.0, 0.5, 1.0))
    if rng.random() < 0.4:
        plan.per_task = {**plan.per_task, FaultKind.CONSUMED_IN_PIECES: strength * rng.uniform(0.02, 0.15)}
    if rng.random() < 0.3:
        plan.per_request = {**plan.per_request, FaultKind.STORED_SLOW_DOWN: strength * rng.uniform(0.005, 0.06)}
    if rng.random() < 0.4:
        plan.per_task = {**plan.per_task, FaultKind.UNREAD_OUTPUT: strength * rng.uniform(0.02, 0.15)}
    if rng.random() < 0.3:
        plan.per_task = {**plan.per_task, FaultKind.WORKER_EXIT: min(1.0, strength * rng.uniform(0.05, 0.5))}
    plan.nemesis = (*plan.nemesis, *(kind for kind, share in _LONG_LASTING.items() if rng.random() < share))
    plan.by_directory = rng.random() < 0.15
    return plan
