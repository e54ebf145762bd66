"""Having enough TaskManagers: takes them in, waits for them, and has hosts launch what is missing (Flink's name)."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

from dstl.checkpoint.fleet.fleet import Fleet
from dstl.checkpoint.fleet.members import Members
from dstl.errors import Closed, DstlError, Invalid, Unavailable
from dstl.rpc.client import Address
from dstl.rpc.fleet_messages import Enlist, Enlisted, Register
from dstl.rpc.messages import Begin, Done
from dstl.rpc.server import Peer
from dstl.runtime import Backoff, Runtime
from dstl.store.base import ObjectStore
from dstl.store.probe import mark_place

_UNMARKING_S = 5.0
"""A mark that the store has not deleted by then is the cleaner's, for a registration waits for this."""


class Enlistment:
    """Takes the TaskManagers of one application in. One event loop.

    Args:
        members: Where they register.
        runtime: Clock.
        plan: Decides who launches; None where another party starts TaskManagers.
        config: What a TaskManager is told when it enlists.
        shared: The location that every TaskManager must find what this leaves in, before it registers; None where they
            run on this host.
    """

    def __init__(
        self,
        members: Members,
        runtime: Runtime,
        *,
        plan: LaunchPlan | None,
        config: bytes,
        shared: ObjectStore | None = None,
    ) -> None:
        self._members = members
        self._runtime = runtime
        self._plan = plan
        self._config = config
        self._shared = shared
        self._marks: dict[str, tuple[str, ...]] = {}
        # What the last TaskManager that may not serve has said, until the run that it was told to is over.
        self._unfit = self._unfit_run = ""

    async def enlist(self, peer: Peer, call: Enlist) -> Enlisted:
        """Tell a process that wants to be a TaskManager how to be one; it registers next, on the same connection."""
        if not self._config:
            raise Invalid("this coordinator takes no TaskManagers in: it knows no configuration for them")
        member_id, plan = call.member, self._plan
        if plan is not None:
            plan.enlisted(member_id, self._runtime.clock.now())
            peer.on_lost = lambda: self._failed(member_id)
        if self._shared is None:
            return Enlisted((), self._config)
        marks = self._marks[member_id] = await mark_place(self._shared, self._runtime)
        return Enlisted(marks, self._config)

    async def register(self, peer: Peer, call: Register) -> Done:
        """Take a TaskManager in that serves by now, or hear why it does not.

        Raises:
            Invalid: What it has said; the tasks that wait for it are told the same.
        """
        member_id = call.member
        await self._unmark(member_id)
        if call.unfit or call.address is None:
            self._unfit, self._unfit_run = f"TaskManager {member_id} cannot serve: {call.unfit}", ""
            self._members.notify()
            raise Invalid(self._unfit)
        lost = await self._members.register(member_id, call.address, call.pid, peer.end)
        if self._plan is not None:
            self._plan.registered(member_id)
        peer.on_lost = lost
        return Done()

    def place(self, host: str, lost: str) -> tuple[Address | None, str]:
        """Return where the one TaskManager of a host listens, or the id of the one that the caller is to launch there.

        There is neither while another is launching it, or after launches that failed.

        Args:
            host: The host that asks.
            lost: The unix socket that does not answer any more; empty for none.
        """
        assert self._plan is not None
        here = [each.address for each in self._members.all.values() if each.address.path != lost]
        for address in here:
            if address.host == host:
                return address, ""
        counts = Counter(address.host for address in here)
        self._plan.hosts = len({host, *counts, *self._plan.coming.values()})
        return None, self._plan.ask(host, self._runtime.clock.now(), self._plan.hosts, counts) or ""

    async def _unmark(self, member_id: str) -> None:
        marks = self._marks.pop(member_id, ())
        if marks and self._shared is not None:
            try:
                async with asyncio.timeout(_UNMARKING_S):
                    await self._shared.delete(marks)
            except (DstlError, TimeoutError) as error:
                _log.debug("%s stay for the cleaner: %s", marks, error)

    def _failed(self, member_id: str) -> None:
        assert self._plan is not None
        _log.warning("TaskManager %s ended before it had registered", member_id)
        self._plan.failed(member_id, self._runtime.clock.now())
        self._members.notify()


@dataclass(slots=True)
class _Launch:
    host: str
    deadline: float


@dataclass(slots=True)
class _Failures:
    count: int
    again_at: float


class LaunchPlan:
    """Spreads the launches of a fleet over the hosts that ask for them. Pure: it is told the time; one event loop.

    A task asks on behalf of its host whenever the fleet is not complete. Its host may launch when it has less than its
    share; a place that is still free after ``spread_s`` goes to a host that has least, and after twice that to any that
    asks: then the host that it was kept for is gone, or has no task to run.

    Invariants:
        1. TaskManagers that are there and those on their way are never more than the fleet's size.
        2. A launch that does not register in time, or ends before it has, is given up, and its place is free again.
        3. A host whose launches fail waits longer each time (``backoff``).

    Args:
        start_s: Seconds that a process has from its launch until it has enlisted, and again until it has registered.
        spread_s: See above. Longer: hosts that are late still get theirs; shorter: the key groups of a host that is
            gone are served again sooner.
        backoff: A host's waits after launches that fail.

    Attributes:
        hosts: How many hosts there are, as far as is known: a host's share is its part of the fleet.
    """

    def __init__(
        self,
        *,
        start_s: float = 30.0,
        spread_s: float = 10.0,
        backoff: Backoff = Backoff(1.0, 30.0),
    ) -> None:
        self.hosts = 1
        self._start_s = start_s
        self._spread_s = spread_s
        self._backoff = backoff
        self._coming: dict[str, _Launch] = {}
        self._failures: dict[str, _Failures] = {}
        self._short_since: float | None = None
        self._launched = 0

    @property
    def coming(self) -> Mapping[str, str]:
        """Hosts of the TaskManagers that are on their way, by member id."""
        return {member_id: launch.host for member_id, launch in self._coming.items()}

    def ask(self, host: str, now: float, size: int, members: Mapping[str, int]) -> str | None:
        """Return the id of the TaskManager that this host shall launch now; None where it shall launch none.

        Args:
            host: The host that a task runs on.
            now: Monotonic seconds.
            size: How many TaskManagers there shall be.
            members: How many have registered, by host.
        """
        for member_id in [m for m, launch in self._coming.items() if launch.deadline <= now]:
            self.failed(member_id, now)
        counts = Counter(members) + Counter(launch.host for launch in self._coming.values())
        if counts.total() >= size:
            self._short_since = None
            return None
        if self._short_since is None:
            self._short_since = now
        waited = now - self._short_since
        failures = self._failures.get(host)
        if failures is not None and now < failures.again_at:
            return None
        if counts[host] >= max(1, size // self.hosts):
            least = min(counts.values(), default=0)
            if waited < (self._spread_s if counts[host] <= least else 2 * self._spread_s):
                return None
        self._launched += 1
        member_id = f"taskmanager-{self._launched}"
        self._coming[member_id] = _Launch(host, now + self._start_s)
        if counts.total() + 1 == size:
            self._short_since = None
        return member_id

    def next_time(self, host: str, now: float) -> float:
        """Return when asking again may give another answer, unless a TaskManager registers or fails before."""
        times = [launch.deadline for launch in self._coming.values()]
        if self._short_since is not None:
            times += [self._short_since + self._spread_s, self._short_since + 2 * self._spread_s]
        if host in self._failures:
            times.append(self._failures[host].again_at)
        return min((time for time in times if time > now), default=now + self._spread_s)

    def enlisted(self, member_id: str, now: float) -> None:
        """Record that a launched process runs and has asked for its configuration."""
        if member_id in self._coming:
            self._coming[member_id].deadline = now + self._start_s

    def registered(self, member_id: str) -> None:
        """Record that a TaskManager is a member now."""
        launch = self._coming.pop(member_id, None)
        if launch is not None:
            self._failures.pop(launch.host, None)

    def failed(self, member_id: str, now: float) -> None:
        """Record that a launched process will not come; does nothing where it has registered."""
        launch = self._coming.pop(member_id, None)
        if launch is None:
            return
        count = self._failures[launch.host].count + 1 if launch.host in self._failures else 1
        self._failures[launch.host] = _Failures(count, now + self._backoff.ceiling(count))


SLOTS_OF_A_TASK_MANAGER = 8
"""Busy slots that one TaskManager serves: a little fewer than those by which its core is full.

Measurements: dstl/docs/decisions/placing-task-managers.md.
"""


def task_managers_of(slots: int) -> int:
    """Return how many TaskManagers a host has that runs so many tasks at once."""
    return max(1, -(-slots // SLOTS_OF_A_TASK_MANAGER))


_log = logging.getLogger(__name__)
_SETTLED_S = 3.0  # executors of one application start within some seconds of each other
_LONGEST_SETTLING_S = 15.0  # a cluster that grows all the time has to start some time
_POLL_S = 0.25  # a twelfth of the settling time
_COUNT_S = 1.0  # the question goes to Spark's JVM; many tasks may wait
_MOST_LOSSES = 4  # beyond the fleet's size: chance takes one or two, a state that kills them takes all


@dataclass(frozen=True, slots=True)
class ExecutorHosts:
    """The hosts that executors run on.

    Attributes:
        count: How many there are.
        settled_s: Seconds since the latest executor came.
        slots: Of each of them, how many tasks it runs at once; empty where they were not counted.
    """

    count: int
    settled_s: float
    slots: tuple[int, ...] = ()

    @property
    def task_managers(self) -> int:
        """Number of TaskManagers that serve them: one at least."""
        return max(1, self.count, sum(map(task_managers_of, self.slots)))


class ResourceManager(Enlistment):
    """The TaskManagers of one application, from their launch to their registration. One event loop.

    Args:
        fleet: Where they register.
        runtime: Clock.
        timeout_s: How long a task waits for the fleet to be complete.
        hosts: Tells the hosts of the executors, which launch TaskManagers then; asked once for each run, and while a
            TaskManager is missing. None where another party starts them.
        follows_hosts: The fleet's size follows hosts and slots at the beginning of a run.
        config: What a TaskManager is told when it enlists.
        shared: The location that every TaskManager must find what this leaves in, before it registers; None where they
            run on this host.
    """

    def __init__(
        self,
        fleet: Fleet,
        runtime: Runtime,
        *,
        timeout_s: float,
        hosts: Callable[[], Awaitable[ExecutorHosts]] | None = None,
        follows_hosts: bool = False,
        config: bytes = b"",
        shared: ObjectStore | None = None,
    ) -> None:
        plan = LaunchPlan() if hosts is not None else None
        super().__init__(fleet, runtime, plan=plan, config=config, shared=shared)
        self._fleet = fleet
        self._timeout_s = timeout_s
        self._hosts = hosts
        self._follows_hosts = follows_hosts
        self._sized_for: str | None = None
        self._counted_at = -_COUNT_S
        self._sizing = asyncio.Lock()

    async def wait_for_fleet(self, peer: Peer, call: Begin, run_id: str) -> str | None:
        """Wait until the fleet is complete, or until the asking task's host shall launch a TaskManager.

        Args:
            peer: The task's connection.
            call: Its call.
            run_id: Its run.

        Returns:
            The id of the TaskManager to launch, after which the task asks again; None when the fleet is complete.

        Raises:
            Unavailable: It was not within ``timeout_s`` seconds, or those that the task has launched do not stay.
            Closed: The task is gone.
            Invalid: A TaskManager has found that it must not serve.
        """
        await self._size(run_id)
        if self._unfit_run not in ("", run_id):
            self._unfit = self._unfit_run = ""
        host, launched = call.host, call.launched
        deadline = self._runtime.clock.now() + self._timeout_s
        while not self._fleet.is_complete:
            await self._count_hosts()
            if self._fleet.is_complete:
                break
            now = self._runtime.clock.now()
            if peer.is_gone:
                raise Closed("the task is gone")
            if self._unfit:
                self._unfit_run = run_id
                raise Invalid(self._unfit)
            if self._plan is not None and host:
                member_id = self._plan.ask(host, now, self._fleet.wanted, Counter(self._fleet.member_hosts))
                if member_id is not None and launched >= self._fleet.wanted + _MOST_LOSSES:
                    self._plan.failed(member_id, now)
                    raise Unavailable(
                        f"{launched} TaskManagers were launched on {host}, and they do not stay: look at what they "
                        "wrote to the executor's standard error; does their state fit into the host's memory?"
                    )
                if member_id is not None:
                    _log.info("host %s launches TaskManager %s", host, member_id)
                    return member_id
            if now >= deadline:
                raise Unavailable(
                    f"{len(self._fleet.pids)} of {self._fleet.wanted} TaskManagers registered within "
                    f"{self._timeout_s:g} s: look at their logs"
                )
            wake = deadline
            if self._plan is not None:
                wake = min(deadline, self._plan.next_time(host, now), max(now, self._counted_at) + _COUNT_S)
            await self._fleet.changed(wake - now)
        return None

    async def _count_hosts(self) -> None:
        """Let the plan know when a host is gone, so that the others need not wait for it."""
        now = self._runtime.clock.now()
        if self._hosts is not None and self._plan is not None and now - self._counted_at >= _COUNT_S:
            self._counted_at = now
            self._plan.hosts = max(1, (await self._hosts()).count)

    async def _size(self, run_id: str) -> None:
        """Learn how many hosts there are, once for each run; wait a little while executors are still coming."""
        if self._hosts is None or self._plan is None or run_id == self._sized_for:
            return
        async with self._sizing:
            if run_id == self._sized_for:
                return
            deadline = self._runtime.clock.now() + _LONGEST_SETTLING_S
            found = await self._hosts()
            while self._follows_hosts and found.settled_s < _SETTLED_S and self._runtime.clock.now() < deadline:
                await self._runtime.clock.sleep(_POLL_S)
                found = await self._hosts()
            self._plan.hosts = max(1, found.count)
            if self._follows_hosts:
                self._fleet.wanted = found.task_managers
                _log.info("run %s has %d TaskManagers on %d hosts", run_id, self._fleet.wanted, self._plan.hosts)
            self._sized_for = run_id
