"""Attempts at a store that does not answer, with growing pauses between them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

from dstl.crash_points import reach
from dstl.errors import CorruptData, DstlError, ObjectExists, OutcomeUnknown, SlowDown, Unavailable
from dstl.runtime import Backoff, Runtime
from dstl.store.base import ByteRange, ObjectInfo, ObjectStore

T = TypeVar("T")

_log = logging.getLogger(__name__)
# Of the pause behind the first attempt: a store that has lost one request has mostly recovered by then.
_FIRST_S = 0.1

STALL_S = 120.0
"""A read, and a restore, that comes no further for so long is given up: a file system may not answer for ever."""


async def read_range(store: ObjectStore, name: str, byte_range: ByteRange | None = None) -> bytes:
    """Return an object's bytes, or a range of them, of a store that answers.

    Raises:
        Unavailable: It does not, or not within :data:`STALL_S`.
    """
    try:
        async with asyncio.timeout(STALL_S):
            return await store.get(name, byte_range)
    except TimeoutError:
        raise Unavailable(f"{store.location} has not given {name} within {STALL_S:g} s") from None


class RetryPolicy:
    """Repeats what may be repeated safely while a store is unavailable.

    Args:
        runtime: Clock, jitter.
        attempts: How often in all.
        longest_s: No pause is longer than so many seconds.

    Attributes:
        attempts: As given; for writers, whose attempts are not all alike.
    """

    def __init__(self, runtime: Runtime, *, attempts: int = 6, longest_s: float = 2.0) -> None:
        self.attempts = attempts
        self._runtime = runtime
        self._backoff = Backoff(_FIRST_S, longest_s)

    async def repeat(self, call: Callable[[], Awaitable[T]], what: str) -> T:
        """Return what a call gives that is sound to repeat, such as a read; ``what`` is for the log.

        Raises:
            Unavailable: It was, at every attempt.
        """
        for attempt in range(1, self.attempts):
            try:
                return await call()
            except Unavailable as error:
                # Once: what comes of it in the end, the caller is told.
                _log.log(logging.WARNING if attempt == 1 else logging.INFO, "%s: %s", what, error)
                await self.pause(attempt)
        return await call()

    async def read(self, call: Callable[[], Awaitable[T]]) -> T:
        """Repeat a read that checks what it returns, once also where it found damage, which may be the network's.

        Raises:
            Unavailable: It was, at every attempt.
            CorruptData: Damage was found twice, so it is in the store.
        """
        damaged = False
        for attempt in range(1, self.attempts):
            try:
                return await call()
            except CorruptData:
                if damaged:
                    raise
                damaged = True
            except Unavailable:
                pass
            await self.pause(attempt)
        return await call()

    async def pause(self, attempt: int) -> None:
        """Wait after an attempt, the first being 1."""
        await self._runtime.clock.sleep(self._backoff.after(attempt, self._runtime.rng))


Check = Callable[[], Awaitable[None]]


class ConditionalPut:
    """Creates objects by put-if-absent, each at a name that several writers may want. One event loop.

    An object carries an id of its writer's request (its put-id), so that a writer whose answer was lost can read back
    whose object is there. A request that was sent ends in exactly one of: stored, taken by another, or unknown. One
    that was answered by ``SlowDown`` was sent: gateways give that answer to requests that were carried out, too.

    Args:
        store: Where to.
        retries: How often a put is tried, and the pauses between.

    Attributes:
        trouble: What the store answered last when it did not take an object; None where it took the last one at once.
            For the messages of a caller that cancels a put that takes too long.
    """

    def __init__(self, store: ObjectStore, retries: RetryPolicy) -> None:
        self.trouble: DstlError | None = None
        self._store = store
        self._retries = retries

    async def put(
        self,
        name: str,
        data: bytes,
        what: str,
        *,
        check_ours: Check,
        taken: type[DstlError],
        check_valid: Check | None = None,
    ) -> ObjectInfo | None:
        """Create an object; when this returns, it is stored, and it is ours.

        Args:
            name: The object's.
            data: Its bytes.
            what: What it is, for messages.
            check_ours: Reads back what is there; raises ``taken`` where it is another's.
            taken: Says that another has the name. Whatever else a check raises says nothing about the object.
            check_valid: Called after a request that was repeated, for it may have created a name anew which others had
                used and deleted; raises ``taken`` where ours means nothing any more. None: it always does.

        Returns:
            What the store says of the object; None where a request was repeated, which is checked then.

        Raises:
            Unavailable: Certainly not stored.
            OutcomeUnknown: May be stored: delete nothing that it refers to. Its cause is what the store answered last.
            DstlError: ``taken``; or what the store answered to the first request, which it refused.
        """
        self.trouble = None
        sent = False
        for attempt in range(self._retries.attempts):
            if attempt:
                await self._retries.pause(attempt)
            try:
                stored = await self._store.put(name, data, if_absent=True)
                reach("C4")
            except ObjectExists:
                await or_unknown(what, check_ours, taken)
                sent, stored = True, None
            except (Unavailable, OutcomeUnknown) as error:
                self.trouble = error
                sent = sent or isinstance(error, (OutcomeUnknown, SlowDown))
                _log.warning("putting %s into %s: %s", what, self._store.location, error)
                continue
            except DstlError as error:
                if sent:
                    raise OutcomeUnknown(f"what became of {what} is unknown: {error}") from error
                raise
            if sent and check_valid is not None:
                await or_unknown(what, check_valid, taken)
            return None if sent else stored
        if sent:
            raise OutcomeUnknown(f"whether {what} is in {self._store.location} is unknown: {self.trouble}") from (
                self.trouble
            )
        raise Unavailable(
            f"{self._store.location} did not take {what} in {self._retries.attempts} attempts: {self.trouble}"
        ) from self.trouble


async def or_unknown(what: str, check: Check, taken: type[DstlError]) -> None:
    """Make a check of an object that may have been sent; one that cannot be made says nothing about the object.

    Raises:
        OutcomeUnknown: It could not be made.
        DstlError: ``taken``: another has the name.
    """
    try:
        await check()
    except taken:
        raise
    except DstlError as error:
        raise OutcomeUnknown(f"what became of {what} is unknown: {error}") from error
