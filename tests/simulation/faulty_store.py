"""What a fault of a store does to a request, and any store with such faults, by call number or by chance.

The store of a simulated world (``store.py``) goes by the same: what a fault means is said here, once.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter, deque
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from zlib import crc32

from dstl.errors import AccessDenied, DstlError, Invalid, OutcomeUnknown, SlowDown, Unavailable
from dstl.runtime import Clock, SystemClock
from dstl.store.base import ByteRange, ObjectInfo, ObjectStore

Latency = Callable[[str, int, random.Random], float]
"""Seconds that a call takes, from verb, bytes and generator."""

_VERBS = frozenset({"put", "get", "head", "list", "delete"})


class Fault(StrEnum):
    """A fault of a call."""

    UNAVAILABLE = "unavailable"
    """Refused before anything was sent: ``Unavailable``, nothing done. Any verb."""
    SLOW_DOWN = "slow-down"
    """503: ``SlowDown``, nothing done. Any verb."""
    RESET = "reset"
    """The connection breaks before the store has the request: nothing done. A put ends with ``OutcomeUnknown``, for
    nobody can tell; the others with ``Unavailable``."""
    LOST_RESPONSE = "lost-response"
    """Done, and the answer lost: ends like ``RESET``. ``put`` and ``delete``."""
    STORED_SLOW_DOWN = "stored-slow-down"
    """Done, and answered by 503: a gateway whose server carried the put out and then broke the connection.
    ``SlowDown``, as for a put that was not done. ``put``."""
    LATE_PUT = "late-put"
    """Ends with ``OutcomeUnknown`` at once, and is done ``delay_s`` later. ``put``."""
    STUCK = "stuck"
    """Never answers, until the caller cancels; a put is done ``delay_s`` after that. Any verb."""
    SLOW = "slow"
    """Done, a good while later. Any verb."""
    DENIED = "denied"
    """The role may not: ``AccessDenied``, nothing done. Any verb."""
    FULL = "full"
    """No space is left: ``Unavailable``, nothing done. ``put``."""
    PARTIAL_DELETE = "partial-delete"
    """Some of the names are deleted: ``Unavailable``. ``delete``."""
    OTHER_ORDER = "list-in-another-order"
    """The list comes directory by directory, as SeaweedFS has it, and these in no order. ``list``."""
    STALE_LIST = "stale-list"
    """The list is as it was ``delay_s`` ago: without newer objects, with those deleted since. ``list``."""
    SHORT_GET = "short-get"
    """Fewer bytes than asked for, without an error. ``get``."""
    CORRUPT_GET = "corrupt-get"
    """One bit flipped. ``get``."""


_FOR_VERBS: dict[Fault, frozenset[str]] = {
    Fault.LOST_RESPONSE: frozenset({"put", "delete"}),
    Fault.STORED_SLOW_DOWN: frozenset({"put"}),
    Fault.LATE_PUT: frozenset({"put"}),
    Fault.FULL: frozenset({"put"}),
    Fault.PARTIAL_DELETE: frozenset({"delete"}),
    Fault.OTHER_ORDER: frozenset({"list"}),
    Fault.STALE_LIST: frozenset({"list"}),
    Fault.SHORT_GET: frozenset({"get"}),
    Fault.CORRUPT_GET: frozenset({"get"}),
}


class Applied(StrEnum):
    """When the store carries a request out."""

    NOW = "now"
    LATER = "later"
    NEVER = "never"


def course_of(fault: Fault | None, verb: str, name: str) -> tuple[Applied, DstlError | None]:
    """Return when a request that meets a fault is carried out, and what its caller is told; None: the result."""
    said = f"{name}: {fault} (injected)"
    lost = OutcomeUnknown(said) if verb == "put" else Unavailable(said)
    match fault:
        case Fault.SLOW_DOWN:
            return Applied.NEVER, SlowDown(said)
        case Fault.UNAVAILABLE | Fault.FULL:
            return Applied.NEVER, Unavailable(said)
        case Fault.DENIED:
            return Applied.NEVER, AccessDenied(said)
        case Fault.RESET:
            return Applied.NEVER, lost
        case Fault.LOST_RESPONSE:
            return Applied.NOW, lost
        case Fault.STORED_SLOW_DOWN:
            return Applied.NOW, SlowDown(said)
        case Fault.PARTIAL_DELETE:
            return Applied.NOW, Unavailable(said)
        case Fault.LATE_PUT | Fault.STUCK:
            return Applied.LATER, lost
    return Applied.NOW, None


Change = tuple[float, ObjectInfo, bool]
"""When an object was made (True) or deleted."""


def as_before(infos: Iterable[ObjectInfo], changes: Iterable[Change], since: float, prefix: str) -> list[ObjectInfo]:
    """Return what a list showed at a moment, from what it shows now and the latest changes, the newest first."""
    known = {info.name: info for info in infos}
    for when, info, made in changes:
        if when <= since:
            break
        if made:
            known.pop(info.name, None)
        elif info.name.startswith(prefix):
            known[info.name] = info
    return [info for _, info in sorted(known.items())]


def by_directory(infos: Iterable[ObjectInfo]) -> list[ObjectInfo]:
    """Return a list in an order in which the names of one directory alone are sorted."""

    def place(info: ObjectInfo) -> tuple[int, str, str]:
        directory = info.name.rpartition("/")[0]
        return crc32(directory.encode()), directory, info.name

    return sorted(infos, key=place)


@dataclass(frozen=True, slots=True)
class FaultRule:
    """A rule that lets a fault happen to calls of one verb, chosen by number, or else by chance.

    Attributes:
        fault: The fault.
        verb: ``put``, ``get``, ``head``, ``list`` or ``delete``.
        nth: The calls of this verb (and these names), counted from 1; empty: by ``chance``.
        chance: Probability per call, 0 to 1; drawn once per call that fits, so a plan is a function of the seed and of
            the order of calls.
        only: Part of the name (of the prefix, for a list; of any name, for a delete); empty for all.
        most: Most times that it happens; None for no bound.
        delay_s: Seconds of the clock by which a put is late, or a list stale.
    """

    fault: Fault
    verb: str
    nth: tuple[int, ...] = ()
    chance: float = 0.0
    only: str = ""
    most: int | None = None
    delay_s: float = 1.0

    def __post_init__(self) -> None:
        if self.verb not in _FOR_VERBS.get(self.fault, _VERBS):
            raise Invalid(f"{self.fault} does not happen to {self.verb!r}")


@dataclass(frozen=True, slots=True)
class FiredFault:
    """A fault that happened: to which call of its verb (from 1), and to which name."""

    fault: Fault
    verb: str
    call: int
    name: str


class FaultyStore:
    """Passes calls on to another store, except where a rule says otherwise; the first rule that fits decides.

    Late puts run as tasks of the loop and outlive their callers, as on a real network; ``drain`` waits for them.
    ``fired`` records what happened and ``calls`` how many calls of each verb there were.

    Args:
        inner: Does the work; closed together with this one.
        rules: The plan; ``rules`` may be changed between calls.
        seed: Of the generator behind ``chance``, latencies and corrupted bits.
        clock: On which delays and latencies are spent.
        latency: Seconds that each call takes before it reaches the inner store.
    """

    def __init__(
        self,
        inner: ObjectStore,
        rules: Iterable[FaultRule] = (),
        *,
        seed: int = 0,
        clock: Clock | None = None,
        latency: Latency | None = None,
    ) -> None:
        self.inner = inner
        self.rules = list(rules)
        self.calls: Counter[str] = Counter()
        self.fired: list[FiredFault] = []
        self._rng = random.Random(seed)
        self._clock: Clock = clock or SystemClock()
        self._latency = latency
        self._matched: Counter[FaultRule] = Counter()
        self._applied: Counter[FaultRule] = Counter()
        self._late: set[asyncio.Task[None]] = set()
        self._changes: deque[Change] = deque(maxlen=10_000)

    @property
    def location(self) -> str:
        """The inner store's."""
        return self.inner.location

    @property
    def late(self) -> int:
        """Puts that are still to happen."""
        return len(self._late)

    async def drain(self) -> None:
        """Wait until every late put has happened (a manual clock must be moved meanwhile)."""
        while self._late:
            await asyncio.gather(*self._late, return_exceptions=True)

    async def put(self, name: str, data: bytes | memoryview, *, if_absent: bool = False) -> ObjectInfo:
        """Store an object, or have it fail as planned."""
        rule = self._plan("put", name)
        body = bytes(data)
        try:
            told = await self._before("put", name, rule, len(body))
        finally:
            if rule is not None and rule.fault in (Fault.LATE_PUT, Fault.STUCK):
                self._later(rule.delay_s, name, body, if_absent)
        info = await self._put(name, body, if_absent)
        if told is not None:
            raise told
        return info

    async def get(self, name: str, byte_range: ByteRange | None = None) -> bytes:
        """Return an object's bytes, or what a fault leaves of them."""
        rule = self._plan("get", name)
        await self._before("get", name, rule, 0)
        body = await self.inner.get(name, byte_range)
        if rule is None or rule.fault not in (Fault.SHORT_GET, Fault.CORRUPT_GET) or not body:
            return body
        at = self._rng.randrange(len(body))
        if rule.fault is Fault.SHORT_GET:
            return body[:at]
        return body[:at] + bytes([body[at] ^ (1 << self._rng.randrange(8))]) + body[at + 1 :]

    async def head(self, name: str) -> ObjectInfo:
        """Return size and age of an object."""
        await self._before("head", name, self._plan("head", name), 0)
        return await self.inner.head(name)

    async def list(self, prefix: str = "") -> AsyncGenerator[ObjectInfo, None]:
        """Yield objects in name order; a stale list as they were."""
        rule = self._plan("list", prefix)
        await self._before("list", prefix, rule, 0)
        infos = [info async for info in self.inner.list(prefix)]
        if rule is not None and rule.fault is Fault.STALE_LIST:
            infos = as_before(infos, reversed(self._changes), self._clock.now() - rule.delay_s, prefix)
        elif rule is not None and rule.fault is Fault.OTHER_ORDER:
            infos = by_directory(infos)
        for info in infos:
            yield info

    async def delete(self, names: Sequence[str]) -> None:
        """Delete objects."""
        rule = self._plan("delete", *names)
        told = await self._before("delete", names[0] if names else "", rule, 0)
        if rule is not None and rule.fault is Fault.PARTIAL_DELETE:
            names = names[: self._rng.randrange(len(names) + 1)]
        gone = [await self._known(name) for name in names]
        await self.inner.delete(names)
        self._changes.extend((self._clock.now(), info, False) for info in gone if info is not None)
        if told is not None:
            raise told

    async def close(self) -> None:
        """Close the inner store; late puts that have not happened never will. Idempotent."""
        for task in list(self._late):
            task.cancel()
        await self.drain()
        await self.inner.close()

    def _plan(self, verb: str, *names: str) -> FaultRule | None:
        self.calls[verb] += 1
        for rule in self.rules:
            if rule.verb != verb or not any(rule.only in name for name in names or ("",)):
                continue
            self._matched[rule] += 1
            hit = self._matched[rule] in rule.nth if rule.nth else self._rng.random() < rule.chance
            if hit and (rule.most is None or self._applied[rule] < rule.most):
                self._applied[rule] += 1
                self.fired.append(FiredFault(rule.fault, verb, self.calls[verb], names[0] if names else ""))
                return rule
        return None

    async def _before(self, verb: str, name: str, rule: FaultRule | None, size: int) -> DstlError | None:
        """Spend the latency and raise the faults that come before the work; return what is raised behind it."""
        if self._latency is not None:
            await self._clock.sleep(self._latency(verb, size, self._rng))
        if rule is None:
            return None
        if rule.fault is Fault.STUCK:
            await asyncio.get_running_loop().create_future()
        if rule.fault is Fault.SLOW:
            await self._clock.sleep(rule.delay_s)
        applied, told = course_of(rule.fault, verb, f"{self.location}/{name}")
        if applied is not Applied.NOW and told is not None:
            raise told
        return told

    async def _put(self, name: str, data: bytes | memoryview, if_absent: bool) -> ObjectInfo:
        info = await self.inner.put(name, data, if_absent=if_absent)
        self._changes.append((self._clock.now(), info, True))
        return info

    async def _known(self, name: str) -> ObjectInfo | None:
        if not any(rule.fault is Fault.STALE_LIST for rule in self.rules):
            return None
        try:
            return await self.inner.head(name)
        except DstlError:
            return None

    def _later(self, delay_s: float, name: str, body: bytes, if_absent: bool) -> None:
        async def arrive() -> None:
            await self._clock.sleep(delay_s)
            try:
                await self._put(name, body, if_absent)
            except DstlError:
                # The late request was refused (the name is taken): nobody listens to it any more.
                return

        task = asyncio.get_running_loop().create_task(arrive(), name="late-put")
        self._late.add(task)
        task.add_done_callback(self._late.discard)
