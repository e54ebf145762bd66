"""Putting an object under a name that exactly one writer wins, over a store whose answers get lost."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

from dstl.crash_points import reach
from dstl.errors import DstlError, ObjectExists, OutcomeUnknown, SlowDown, Unavailable
from dstl.store.base import ObjectStore
from dstl.store.patience import Patience

__all__ = ["PutOnce", "or_unknown"]

_log = logging.getLogger(__name__)

Check = Callable[[], Awaitable[None]]


class PutOnce:
    """Creates objects by put-if-absent, each at a name that several writers may want. One event loop.

    An object carries an id of its writer's request (its put-id), so that a writer whose answer was lost can read back
    whose object is there. A request that was sent ends in exactly one of: stored, taken by another, or unknown. One
    that was answered by ``SlowDown`` was sent: gateways give that answer to requests that were carried out, too.

    Args:
        store: Where to.
        patience: How often a put is tried, and the pauses between.

    Attributes:
        trouble: What the store answered last when it did not take an object; None where it took the last one at once.
            For messages of whoever cancels a put that takes too long.
    """

    def __init__(self, store: ObjectStore, patience: Patience) -> None:
        self.trouble: DstlError | None = None
        self._store = store
        self._patience = patience

    async def put(
        self,
        name: str,
        data: bytes,
        what: str,
        *,
        check_ours: Check,
        taken: type[DstlError],
        check_valid: Check | None = None,
    ) -> None:
        """Create an object; when this returns, it is stored, and it is ours.

        Args:
            name: The object's.
            data: Its bytes.
            what: What it is, for messages.
            check_ours: Reads back what is there; raises ``taken`` where it is another's.
            taken: Says that another has the name. Whatever else a check raises says nothing about the object.
            check_valid: Called after a request that was repeated, for it may have created a name anew which others had
                used and deleted; raises ``taken`` where ours means nothing any more. None: it always does.

        Raises:
            Unavailable: Certainly not stored.
            OutcomeUnknown: May be stored: delete nothing that it refers to. Its cause is what the store answered last.
            DstlError: ``taken``; or what the store answered to the first request, which it refused.
        """
        self.trouble = None
        sent = False
        for attempt in range(self._patience.attempts):
            if attempt:
                await self._patience.pause(attempt)
            try:
                await self._store.put(name, data, if_absent=True)
                reach("C4")
            except ObjectExists:
                await or_unknown(what, check_ours, taken)
                sent = True
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
            return
        if sent:
            raise OutcomeUnknown(f"whether {what} is in {self._store.location} is unknown: {self.trouble}") from (
                self.trouble
            )
        raise Unavailable(
            f"{self._store.location} did not take {what} in {self._patience.attempts} attempts: {self.trouble}"
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
