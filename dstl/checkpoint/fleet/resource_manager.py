"""Having enough TaskManagers: takes them in, waits for them, and has hosts launch what is missing (Flink's name)."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from dstl.checkpoint.fleet.fleet import Fleet
from dstl.checkpoint.fleet.fleet_size import task_managers_of
from dstl.checkpoint.fleet.launch_plan import LaunchPlan
from dstl.errors import Closed, DstlError, Invalid, Unavailable
from dstl.rpc.fleet_messages import Enlist, Enlisted, Register
from dstl.rpc.messages import Begin, Done
from dstl.rpc.server import Peer
from dstl.runtime import Runtime
from dstl.store.base import ObjectStore
from dstl.store.probe import mark_place

__all__ = ["ExecutorHosts", "ResourceManager"]

_log = logging.getLogger(__name__)
_SETTLED_S = 3.0
_LONGEST_SETTLING_S = 15.0
_POLL_S = 0.25
_COUNT_S = 1.0
_MOST_LOSSES = 4
_UNMARKING_S = 5.0


@dataclass(frozen=True, slots=True)
class ExecutorHosts:
    """The hosts that executors run on.

    Attributes:
        count: How many there are.
        settled_s: Seconds since the latest executor came.
        slots: Of each of them, how many tasks it runs at once; empty where nobody has counted.
    """

    count: int
    settled_s: float
    slots: tuple[int, ...] = ()

    @property
    def task_managers(self) -> int:
        """Number of TaskManagers that serve them: one at least."""
        return max(1, self.count, sum(map(task_managers_of, self.slots)))


class ResourceManager:
    """The TaskManagers of one application, from their launch to their registration. One event loop.

    Args:
        fleet: Where they register.
        runtime: Clock.
        timeout_s: How long a task waits for the fleet to be complete.
        plan: Decides who launches; None where another party starts TaskManagers.
        hosts: Tells the hosts of the executors; asked once for each run, and while a TaskManager is missing.
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
        plan: LaunchPlan | None = None,
        hosts: Callable[[], Awaitable[ExecutorHosts]] | None = None,
        follows_hosts: bool = False,
        config: bytes = b"",
        shared: ObjectStore | None = None,
    ) -> None:
        self._fleet = fleet
        self._runtime = runtime
        self._timeout_s = timeout_s
        self._plan = plan
        self._hosts = hosts
        self._follows_hosts = follows_hosts
        self._config = config
        self._shared = shared
        self._marks: dict[str, tuple[str, ...]] = {}
        # What the last TaskManager that may not serve has said, until the run that it was told to is over.
        self._unfit = self._unfit_run = ""
        self._sized_for: str | None = None
        self._counted_at = -_COUNT_S
        self._sizing = asyncio.Lock()

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
            self._fleet.notify()
            raise Invalid(self._unfit)
        lost = await self._fleet.register(member_id, call.address, call.pid, peer.end)
        if self._plan is not None:
            self._plan.registered(member_id)
        peer.on_lost = lost
        return Done()

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
        self._fleet.notify()

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
