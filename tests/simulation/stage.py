"""The ground that all parts of a simulated world stand on: its seed, loop, faults, logs, trace and figures."""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections import Counter
from contextvars import copy_context

from dstl.checkpoint.savepoint.format import Savepoint
from tests.simulation.evolving import MISTAKES, VERSIONS
from tests.simulation.faces import BRIEF, EVOLVING, FACES, SPARKS
from tests.simulation.faults import FaultKind, FaultPlan, draw_plan
from tests.simulation.network import NetworkLoop
from tests.simulation.process import Process
from tests.simulation.spark import APPENDING, CLOCKED, QueryLogs
from tests.simulation.store import Stored
from tests.simulation.user_faces import RULED, USER_FACES

CROWD = 24
"""Key groups of a crowded world, and the most tasks of an operator there: a third, two thirds or all of them."""
_MAX_PARALLELISM = 8
_DEPLOYED = 0.3
"""Share of the drivers that run a newer version of the program than the one before."""
_MISTAKEN = 0.2
"""Share of those that run one whose states cannot follow the stored ones: it is refused, and replaced."""
_FACED = 0.2
"""Share of the worlds with an operator of a face that is not a clock's."""
_BEHIND_SPARK = 0.06
"""Share of those with one that goes by Spark's own watermark."""
_LAUNCHES = 0.12
"""Share of the worlds in which tasks launch TaskManagers on their executors' hosts."""
_RULED = 0.08
"""Share of those with one that has a broadcast stream."""
_OF_USERS = 0.15
"""Share of those with one that a careless, thorough or late user has written."""


def driver_of(run: str) -> str:
    """Return which driver a run is of, as ``program`` names them."""
    return run.removeprefix("run-").rpartition("-")[0]


class Stage:
    """Seed, loop, faults, logs, trace and figures of one world.

    Attributes:
        plan: The faults.
        is_crowded: Whether operators have many tasks.
        logs: Spark's checkpoint directory and the right state.
        operators: Uids of the query's appending operators.
        faces: Uids of its operators of other kinds; often none.
        savepoints: Those that were made.
        violated: Set with the first violation.
        is_calm: Whether nothing has been wrong for long, and nothing may fail.
        materializes: Whether its TaskManagers make bases, and runs that end wait for them.
        generations: How many bases of a key group are kept.
        is_roomy: Whether nothing makes them store changes before a checkpoint asks.
        launches: Whether tasks launch TaskManagers on their executors' hosts.
        task_managers: Number of the newest driver's.
        fired: Number of times that each fault has happened.
        drivers_started: Drivers that there have been.
        clocks_set: How often a clock was set, from the beginning on; 0 where all are right.
        damaged: Objects of which a bit is wrong, as they were.
        asleep: Processes that are stopped for longer than faults last: for days, or for good.
    """

    def __init__(self, loop: NetworkLoop, seed: int, *, plan: FaultPlan | None, keep_trace: bool) -> None:
        self.seed = seed
        self.loop = loop
        self.began = loop.time()
        self.context = copy_context()
        self.plan = plan if plan is not None else draw_plan(self.rng("plan"))
        self.fired: Counter[FaultKind] = Counter()
        self.lines: list[str] | None = [] if keep_trace else None
        self._digest = hashlib.blake2b(digest_size=16)
        # Many tasks of an operator now and then; drawn apart, so that other seeds stay what they were.
        self.is_crowded = self.rng("crowd").random() < 0.1
        self.own_rng = self.rng("world")
        self.logs = QueryLogs(self.own_rng.choice((4, 12)), CROWD if self.is_crowded else _MAX_PARALLELISM)
        self.operators = APPENDING[: self.own_rng.choice((1, 1, 2))]
        clocks = self.rng("clocks")
        self.faces = [uid for uid in CLOCKED if clocks.random() < 0.15 and not self.is_crowded]
        faces = self.rng("faces")
        if faces.random() < _FACED and not self.is_crowded:
            known = [uid for uid in FACES if uid not in {*CLOCKED, *USER_FACES, *BRIEF, SPARKS}]
            self.faces += faces.sample(known, faces.choice((1, 1, 2)))
        users = self.rng("user-faces")
        if users.random() < _OF_USERS and not self.is_crowded:
            self.faces += users.sample([uid for uid in USER_FACES if uid != RULED], users.choice((1, 1, 2)))
        # Drawn apart, so that other seeds stay what they were.
        if self.rng("broadcast").random() < _RULED and not self.is_crowded:
            self.faces.append(RULED)
        if self.rng("sparks-watermark").random() < _BEHIND_SPARK and not self.is_crowded:
            self.faces.append(SPARKS)
        self.may_corrupt = FaultKind.SHORT_GET in self.plan.per_request
        self.grace_s = 2 * self.plan.longest_delay_s + 180.0
        self.savepoints: list[Savepoint] = []
        self.violated = asyncio.Event()
        self.launches = self.rng("launches").random() < _LAUNCHES
        self.is_calm = self.materializes = self.is_roomy = False
        self.generations = 0
        self.task_managers = 0
        self.asleep: list[Process] = []
        self.clocks_set = 0
        self.damaged: dict[str, Stored] = {}
        self._versions: dict[str, int] = {}
        self._written = -1
        self.restores = self.replays = self.cleanings = self.materialized = self.given_up = self.drivers_started = 0

    def rng(self, name: str) -> random.Random:
        """Return a generator of its own for a part of the world, so that parts do not disturb each other."""
        return random.Random(f"{self.seed}:{name}")

    def deploy(self, driver: str) -> int:
        """Return the version of the program that a new driver runs: never an older one than the last driver's."""
        version, mistakes = max(self._versions.values(), default=0), self.rng(f"{driver}:mistake")
        if self._written >= 0 and not self.plan.healed and EVOLVING in self.faces and mistakes.random() < _MISTAKEN:
            self._versions[driver] = mistakes.choice(MISTAKES)
            return self._versions[driver]
        # What a version has never written follows from those before it.
        if version == self._written and self.rng(f"{driver}:version").random() < _DEPLOYED:
            version = min(version + 1, VERSIONS - 1)
        self._versions[driver] = version
        return version

    def version_of(self, run: str) -> int:
        """Return the version of the program that a run is of."""
        return self._versions[driver_of(run)]

    def wrote(self, run: str) -> None:
        """A checkpoint of a run is committed."""
        self._written = max(self._written, self.version_of(run))

    def is_outdated(self, driver: str) -> bool:
        """Return whether a newer version than a driver's may have changed the state: then its program is refused."""
        return EVOLVING in self.faces and self._versions[driver] < max(self._versions.values())

    def count(self, kind: FaultKind) -> None:
        """Note that a fault has happened."""
        self.fired[kind] += 1

    def trace(self, what: str, detail: str) -> None:
        """Add a line to the trace, whose digest identifies the run."""
        line = f"{self.loop.time() - self.began:.9f} {what} {detail}"
        self._digest.update(line.encode() + b"\n")
        if self.lines is not None:
            self.lines.append(line)

    @property
    def trace_hash(self) -> str:
        """Digest of everything that was traced so far."""
        return self._digest.hexdigest()
