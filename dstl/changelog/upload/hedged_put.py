"""The upload of one object: its attempts, its one timer and its end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from dstl.changelog.upload.connection_pools import ConnectionPools
from dstl.changelog.upload.hedging import HedgePolicy, Verdict
from dstl.crash_points import reach
from dstl.errors import Closed, Invalid, OutcomeUnknown, SlowDown, Unavailable
from dstl.metrics import Recorder
from dstl.options import UploadOptions
from dstl.runtime import Clock
from dstl.store.background_deleter import BackgroundDeleter
from dstl.store.base import ObjectInfo

if TYPE_CHECKING:
    import random  # noqa: TID251  (the type alone)

_LAG_SHARE = 0.1  # of a wait: a timer that is later than this says more of the loop than of the store
_LAG_S = 0.005  # what a busy loop is late by all the time
_ASK_AGAIN_S = 0.0005  # rounding must not make a timer of zero


@dataclass(frozen=True, slots=True)
class StoredObject:
    """The attempt that won: the only one of its upload whose name may be referenced.

    Attributes:
        name: Of the object, relative to the store's location.
        size: In bytes, confirmed by the store.
        checksum: CRC-32C of the bytes.
    """

    name: str
    size: int
    checksum: int


@dataclass(frozen=True, slots=True)
class UploadContext:
    """The parts that all uploads of an uploader share.

    Attributes:
        loop: That everything runs on.
        clock: Of the loop.
        rng: For jitter.
        options: Attempts, timeouts, back-off.
        hedging: Whether hedges may be sent.
        policy: Decides about them.
        pools: Where requests go.
        losers: Deletes what losing attempts leave, after a grace.
        recorder: Metrics.
        settled: Told of each upload that is over.
    """

    loop: asyncio.AbstractEventLoop
    clock: Clock
    rng: random.Random
    options: UploadOptions
    hedging: bool
    policy: HedgePolicy
    pools: ConnectionPools
    losers: BackgroundDeleter
    recorder: Recorder
    settled: Callable[[Upload], None]

    def timeout(self, size: int) -> float:
        """Seconds after which an attempt at so many bytes counts as lost."""
        return self.options.attempt_timeout_s + size / self.options.min_throughput


@dataclass(slots=True, eq=False)
class _Attempt:
    """One request under its own name."""

    task: asyncio.Task[ObjectInfo]
    name: str
    started: float
    hedge: bool
    pool: int
    lagged: bool = False


class Upload:
    """The upload of one object: awaitable; its result is the :class:`StoredObject`.

    Cancelling an ``await`` of it does not stop it; :meth:`cancel` does. Made by ``Uploader.submit`` only.

    Attributes:
        sent: Requests that were sent so far.
        hedges: How many of those were second ones.
        critical: True where a checkpoint waits for it.
    """

    def __init__(
        self,
        owner: UploadContext,
        name_of: Callable[[int], str],
        data: bytes | memoryview,
        checksum: int,
        critical: bool,
    ) -> None:
        self._owner = owner
        self._name_of = name_of
        self._data = data
        self._size = len(data)
        self._checksum = checksum
        self.critical = critical
        self._future: asyncio.Future[StoredObject] = owner.loop.create_future()
        self._began = owner.clock.now()
        self._ticket = owner.policy.began(self._began, self._size, critical)
        self._active: list[_Attempt] = []
        self._youngest = self._began
        self.sent = self._tries = self.hedges = self._failures = 0
        self._last_error: BaseException | None = None
        self._denied = ""
        self._timer: asyncio.TimerHandle | None = None
        self._due = 0.0
        self._hedge_at: float | None = None
        self._retry_at: float | None = None

    def make_critical(self) -> None:
        """A checkpoint has begun to wait for it: it is hedged earlier and before those that no checkpoint waits for."""
        if self.critical or self._future.done():
            return
        self.critical = True
        if self._hedge_at is not None:
            due = self._youngest + self._owner.policy.delay(self._size, True)
            self._hedge_at = max(self._owner.clock.now(), min(self._hedge_at, due))
            self._arm()

    def cancel(self) -> None:
        """Give it up: its attempts are cancelled and what they may leave is deleted; waiters see ``Closed``."""
        self.fail(Closed(f"upload of {self._size} bytes was given up before it was stored"))

    def __await__(self) -> Generator[object, None, StoredObject]:
        return asyncio.shield(self._future).__await__()

    # -- attempts

    def attempt(self, *, hedge: bool) -> None:
        """Send one request, the first, a retry or a hedge, under a new name."""
        owner = self._owner
        number = self.sent
        self.sent += 1
        if hedge:
            self.hedges += 1
        else:
            self._tries += 1
        now = owner.clock.now()
        pool = owner.pools.choose(
            now, [active.pool for active in self._active], first=owner.hedging and not hedge and self._failures == 0
        )
        try:
            name = self._name_of(number)
        except Exception as error:
            self.fail(error)
            return
        task = owner.loop.create_task(owner.pools.stores[pool].put(name, self._data))
        attempt = _Attempt(task, name, now, hedge, pool)
        self._active.append(attempt)
        self._youngest = now
        reach("T3")
        task.add_done_callback(partial(self._on_ended, attempt))
        self._retry_at = None
        if owner.hedging:
            self._hedge_at = now + owner.policy.delay(self._size, self.critical)
        self._arm()

    def _on_ended(self, attempt: _Attempt, task: asyncio.Task[ObjectInfo]) -> None:
        """One request has an answer, or was cancelled."""
        if self._future.done() or attempt not in self._active:
            if not task.cancelled():
                task.exception()  # seen: a loser's error does not matter
            return
        if task.cancelled():
            error: BaseException | None = Unavailable(f"PUT of {attempt.name} was cancelled by the store")
        else:
            error = task.exception()
        if error is None:
            info = task.result()
            if info.size == self._size:
                reach("T4")
                self._succeed(attempt)
                return
            error = Unavailable(f"{attempt.name}: the store confirmed {info.size} bytes of {self._size}; trying again")
        self._lost(attempt, error)

    def _succeed(self, winner: _Attempt) -> None:
        owner = self._owner
        now = owner.clock.now()
        active, self._active = self._active, []
        if len(active) > 1:
            reach("T6")
        if winner.hedge:
            for attempt in active:
                if not attempt.hedge and not attempt.lagged:
                    owner.policy.learn(now, self._size, now - attempt.started)
            owner.recorder.increment("hedgesWon")
        elif not winner.lagged:
            owner.policy.learn(now, self._size, now - winner.started)
        for attempt in active:
            if attempt is not winner:
                self._discard(attempt)
        stored = StoredObject(winner.name, self._size, self._checksum)
        self._settle(stored=True)
        self._future.set_result(stored)
        owner.settled(self)
        recorder = owner.recorder
        recorder.increment("numberOfUploadRequests")
        recorder.observe("uploadSizes", self._size)
        recorder.observe("uploadLatenciesNanos", (now - self._began) * 1e9)
        recorder.observe("attemptsPerUpload", self._failures + 1)
        recorder.observe("totalAttemptsPerUpload", self.sent)

    def _lost(self, attempt: _Attempt, error: BaseException) -> None:
        """One attempt has failed or is given up; only when it was the last active one does anything follow."""
        owner = self._owner
        self._active.remove(attempt)
        self._failures += 1
        self._last_error = error
        if not isinstance(error, SlowDown):
            owner.losers.delete([attempt.name])
        now = owner.clock.now()
        if isinstance(error, SlowDown):
            owner.policy.throttled(now)
            owner.recorder.increment("slowDowns")
        elif isinstance(error, Invalid) or not isinstance(error, (Unavailable, OutcomeUnknown)):
            self.fail(error)
            return
        if self._active:
            self._arm()
            return
        if self._tries >= owner.options.max_attempts:
            self.fail(self._given_up(f"{self.sent} attempts failed"))
            return
        doublings = self._failures - 1
        base = owner.options.backoff_base_s
        if isinstance(error, SlowDown):
            base = owner.options.throttle_backoff_s
            doublings += owner.policy.pause.storm - 1
        ceiling = min(owner.options.backoff_cap_s, base * 2.0**doublings)
        self._hedge_at = None
        self._retry_at = now + owner.rng.random() * ceiling
        self._arm()

    def _given_up(self, why: str) -> Unavailable:
        location = self._owner.pools.stores[0].location
        given_up = Unavailable(
            f"upload of {self._size} bytes to {location} failed: {why}; last: {self._last_error}; "
            "its bytes are kept: check the store and let the checkpoint run again"
        )
        given_up.__cause__ = self._last_error
        return given_up

    def _discard(self, attempt: _Attempt) -> None:
        attempt.task.cancel()
        self._owner.losers.delete([attempt.name])
        self._owner.pools.closed_one(attempt.pool)

    def fail(self, error: BaseException) -> None:
        """Settle it with this error, unless it is settled."""
        if self._future.done():
            return
        active, self._active = self._active, []
        for attempt in active:
            self._discard(attempt)
        self._settle(stored=False)
        self._future.set_exception(error)
        self._future.exception()  # seen: a pre-emptive upload may have no waiter yet
        self._owner.settled(self)
        self._owner.recorder.increment("numberOfUploadRequests")
        self._owner.recorder.increment("numberOfUploadFailures")

    def _settle(self, *, stored: bool) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._owner.policy.finished(self._owner.clock.now(), self._ticket, stored=stored)

    # -- time

    def _arm(self) -> None:
        """Set the one timer to the first of: hedge, retry, an attempt's timeout, the deadline."""
        due = self._began + self._owner.options.deadline_s
        if self._hedge_at is not None and self._hedge_at < due:
            due = self._hedge_at
        if self._retry_at is not None and self._retry_at < due:
            due = self._retry_at
        if self._active:
            lost = self._active[0].started + self._owner.timeout(self._size)
            if lost < due:
                due = lost
        if self._timer is not None:
            self._timer.cancel()
        self._due = due
        wait = due - self._owner.clock.now()
        self._timer = self._owner.loop.call_later(wait if wait > 0.0 else 0.0, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        owner = self._owner
        lag = owner.clock.now() - self._due
        if lag > _LAG_S and lag > _LAG_SHARE * (self._due - self._youngest):
            # The loop was busy: what the store has answered meanwhile is read first, and it is not blamed for the lag.
            for attempt in self._active:
                attempt.lagged = True
            owner.recorder.increment("loopLagSeconds", lag)
            if self._hedge_at is not None:
                self._hedge_at += lag
            owner.loop.call_soon(owner.loop.call_soon, self._on_time)
            return
        self._on_time()

    def _on_time(self) -> None:
        if self._future.done():
            return
        owner = self._owner
        now = owner.clock.now()
        if now >= self._began + owner.options.deadline_s:
            self.fail(self._given_up(f"not stored within {owner.options.deadline_s:g} s"))
            return
        if self._active and now >= self._active[0].started + owner.timeout(self._size):
            oldest = self._active[0]
            if not oldest.hedge and not oldest.lagged:
                owner.policy.learn(now, self._size, now - oldest.started)
            oldest.task.cancel()
            self._lost(oldest, OutcomeUnknown(f"PUT of {oldest.name} had no answer in time"))
            return
        if self._retry_at is not None and now >= self._retry_at:
            owner.policy.budget.pay(self._size)  # as a hedge is
            self.attempt(hedge=False)
            return
        if self._hedge_at is not None and now >= self._hedge_at:
            self._consider_hedge(now)
            return
        self._arm()

    def _consider_hedge(self, now: float) -> None:
        owner = self._owner
        answer = owner.policy.ask(
            now, size=self._size, age=now - self._youngest, hedges=self.hedges, critical=self.critical
        )
        if answer.verdict is not Verdict.WAIT:
            owner.policy.outlived(self._ticket)
        if answer.verdict is Verdict.SEND:
            owner.recorder.increment("hedgesSent")
            owner.recorder.increment("hedgeBytes", self._size)
            self.attempt(hedge=True)
            reach("T5")
            return
        if answer.reason and answer.reason != self._denied:
            self._denied = answer.reason
            owner.recorder.increment(f"hedgesDenied.{answer.reason}")
        self._hedge_at = None if answer.verdict is Verdict.NEVER else now + max(answer.ask_again_s, _ASK_AGAIN_S)
        self._arm()
