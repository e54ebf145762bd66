"""The plan says which executor host starts a TaskManager, and when. The coordinator asks it; a worker there obeys."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["LaunchPlan"]


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
    share; a place that is still free after ``spread_s`` goes to a host that has least, and after twice that to whoever
    asks: then the host that it was kept for is gone, or has no task to run.

    Invariants:
        1. TaskManagers that are there and those on their way are never more than the fleet's size.
        2. A launch that does not register in time, or ends before it has, is given up, and its place is free again.
        3. A host whose launches fail waits longer each time, up to ``longest_backoff_s``.

    Args:
        start_s: Seconds that a process has from its launch until it has enlisted, and again until it has registered.
        spread_s: See above. Longer: hosts that are late still get theirs; shorter: the key groups of a host that is
            gone are served again sooner.
        backoff_s: A host's wait after its first failed launch; doubles.
        longest_backoff_s: Where it stops doubling.

    Attributes:
        hosts: How many hosts there are, as far as is known: a host's share is its part of the fleet.
    """

    def __init__(
        self,
        *,
        start_s: float = 30.0,
        spread_s: float = 10.0,
        backoff_s: float = 1.0,
        longest_backoff_s: float = 30.0,
    ) -> None:
        self.hosts = 1
        self._start_s = start_s
        self._spread_s = spread_s
        self._backoff_s = backoff_s
        self._longest_backoff_s = longest_backoff_s
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
        """Return when asking again may give another answer, if nobody registers or fails before."""
        times = [launch.deadline for launch in self._coming.values()]
        if self._short_since is not None:
            times += [self._short_since + self._spread_s, self._short_since + 2 * self._spread_s]
        if host in self._failures:
            times.append(self._failures[host].again_at)
        return min((time for time in times if time > now), default=now + self._spread_s)

    def enlisted(self, member_id: str, now: float) -> None:
        """Take note that a launched process runs and has asked for its configuration."""
        if member_id in self._coming:
            self._coming[member_id].deadline = now + self._start_s

    def registered(self, member_id: str) -> None:
        """Take note that a TaskManager is a member now."""
        launch = self._coming.pop(member_id, None)
        if launch is not None:
            self._failures.pop(launch.host, None)

    def failed(self, member_id: str, now: float) -> None:
        """Take note that a launched process will not come; does nothing where it has registered."""
        launch = self._coming.pop(member_id, None)
        if launch is None:
            return
        count = self._failures[launch.host].count + 1 if launch.host in self._failures else 1
        wait = min(self._backoff_s * 2 ** min(count - 1, 16), self._longest_backoff_s)
        self._failures[launch.host] = _Failures(count, now + wait)
