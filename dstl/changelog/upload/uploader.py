"""The uploader: stores frozen bodies under names of their own, with retries, hedges and deletion of what lost.

The :class:`~dstl.changelog.upload.hedging.HedgePolicy` decides; this executes it: an upload has its attempts, one timer
and one end.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator
from dataclasses import dataclass
from functools import partial

from dstl.changelog.upload.connection_pools import ConnectionPools
from dstl.changelog.upload.hedging import HedgePolicy, Verdict
from dstl.crash_points import reach
from dstl.errors import Closed, Invalid, OutcomeUnknown, SlowDown, Unavailable
from dstl.metrics import NullRecorder, Recorder
from dstl.options import HedgingOptions, UploadOptions
from dstl.runtime import Backoff, Runtime
from dstl.store.background_deleter import BackgroundDeleter
from dstl.store.base import ObjectInfo, ObjectStore

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
        sent: Requests that were sent so far, hedges included.
        hedges: How many of those were hedges; the winner may be either.
        critical: True where a checkpoint waits for it.
    """

    def __init__(
        self,
        owner: Uploader,
        name_of: Callable[[int], str],
        data: bytes | memoryview,
        checksum: int,
        critical: bool,
    ) -> None:
        self._owner = owner
        self._name_of = name_of
        self._data = data
        self._size = len(data)
        # After which an attempt at so many bytes counts as lost.
        self._attempt_s = owner.options.attempt_timeout_s + self._size / owner.options.min_throughput
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
            owner.recorder.increment("hedgesWon")
        for attempt in active if winner.hedge else (winner,):
            self._learn(attempt, now)
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

    def _learn(self, attempt: _Attempt, now: float) -> None:
        """Tell the policy how long a first attempt took, or its age; one that the loop held up says nothing."""
        if not attempt.hedge and not attempt.lagged:
            self._owner.policy.learn(now, self._size, now - attempt.started)

    def _lost(self, attempt: _Attempt, error: BaseException) -> None:
        """One attempt has failed or is given up; only when it was the last active one does anything follow."""
        owner = self._owner
        self._active.remove(attempt)
        self._failures += 1
        self._last_error = error
        now = owner.clock.now()
        if isinstance(error, SlowDown):
            owner.policy.throttled(now)
            owner.recorder.increment("slowDowns")
        else:
            owner.losers.delete([attempt.name])
        if isinstance(error, Invalid) or not isinstance(error, (Unavailable, OutcomeUnknown)):
            self.fail(error)
            return
        if self._active:
            self._arm()
            return
        if self._tries >= owner.options.max_attempts:
            self.fail(self._given_up(f"{self.sent} attempts failed"))
            return
        failures, first_s = self._failures, owner.options.backoff_base_s
        if isinstance(error, SlowDown):
            failures += owner.policy.pause.storm - 1
            first_s = owner.options.throttle_backoff_s
        self._hedge_at = None
        self._retry_at = now + owner.rng.random() * Backoff(first_s, owner.options.backoff_cap_s).ceiling(failures)
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
        owner = self._owner
        lost = self._active[0].started + self._attempt_s if self._active else None
        ends = (self._began + owner.options.deadline_s, self._hedge_at, self._retry_at, lost)
        if self._timer is not None:
            self._timer.cancel()
        self._due = min(at for at in ends if at is not None)
        self._timer = owner.loop.call_later(max(0.0, self._due - owner.clock.now()), self._on_timer)

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
        if self._active and now >= self._active[0].started + self._attempt_s:
            oldest = self._active[0]
            self._learn(oldest, now)
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


class Uploader:
    """All uploads of a process: one hedging policy, one budget, two connection pools.

    Invariants:
        1. An upload succeeds only when the store has confirmed the object's length under the winner's name.
        2. Every attempt has a name of its own. An attempt whose outcome is unknown is at worst an orphan, because only
           the winner's name is handed out; so ``Unavailable`` truly means: nowhere that anything refers to.
        3. It fails only when its last active attempt has ended (FLINK-26396), and nothing of a loser stays behind but
           what the store creates after the grace (FLINK-26485).
        4. An attempt and its hedge never share a connection pool, when there are two.

    Belongs to one event loop; made and used on it. Its parts are its uploads'.

    Args:
        store: Where objects go.
        runtime: Clock (that of the loop) and rng (jitter).
        options: Attempts, timeouts, back-off.
        hedging: The policy's options.
        recorder: Flink's ``numberOfUploadRequests``, ``numberOfUploadFailures``, ``uploadSizes``,
            ``uploadLatenciesNanos``, ``attemptsPerUpload`` (that were needed for the winner),
            ``totalAttemptsPerUpload``; ours ``hedgesSent``, ``hedgesWon``, ``hedgesDenied.<reason>``, ``hedgeBytes``,
            ``slowDowns``, ``loopLagSeconds``, ``losersDeleted``, ``losersLeftToCleaner``.
        hedge_store: The same location over other connections; the same store when None.
    """

    def __init__(
        self,
        store: ObjectStore,
        *,
        runtime: Runtime,
        options: UploadOptions,
        hedging: HedgingOptions,
        recorder: Recorder = NullRecorder(),
        hedge_store: ObjectStore | None = None,
    ) -> None:
        self.loop = asyncio.get_running_loop()
        self.clock, self.rng = runtime.clock, runtime.rng
        self.options = options
        self.hedging = hedging.enabled
        self.policy = HedgePolicy(hedging)
        self.pools = ConnectionPools(store, hedge_store or store, hedging.warm_after_s, runtime.clock.now())
        self.recorder = recorder
        self.losers = BackgroundDeleter(
            store,
            clock=runtime.clock,
            grace_s=options.delete_grace_s,
            backlog=options.delete_backlog,
            recorder=recorder,
            deleted="losersDeleted",
            left="losersLeftToCleaner",
        )
        self._uploads: dict[Upload, None] = {}
        self._closed = False

    def submit(
        self,
        name_of: Callable[[int], str],
        data: bytes | memoryview,
        *,
        critical: bool,
        checksum: int,
    ) -> Upload:
        """Start an upload and return its handle at once.

        Args:
            name_of: Returns a name never used before for attempt 0, 1, ...; best with another first path element each
                time, for what is slow may be the part of the store that the first element leads to.
            data: The body; frozen from now on.
            critical: Whether a checkpoint waits for it; see :meth:`Upload.make_critical`.
            checksum: CRC-32C of ``data``.

        Raises:
            Closed: The uploader was closed before. Awaiting the upload raises it, too, if it is closed meanwhile.
            Unavailable: When it is awaited: attempts or deadline are exhausted; nothing that may be referenced is
                stored. AccessDenied and Invalid come at once.
        """
        if self._closed:
            raise Closed("the uploader is closed: open the changelog storage again")
        upload = Upload(self, name_of, data, checksum, critical)
        self._uploads[upload] = None
        upload.attempt(hedge=False)
        return upload

    def settled(self, upload: Upload) -> None:
        """An upload is over."""
        self._uploads.pop(upload, None)

    async def close(self) -> None:
        """Settle everything: pending uploads fail with ``Closed``; losers are deleted once more. Idempotent."""
        self._closed = True
        for upload in list(self._uploads):
            upload.fail(Closed("the uploader was closed before the object was stored; its bytes are kept"))
        await self.losers.close()
