"""Work that runs ahead of the consumer of its results: in order, and bounded in number and in bytes."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
from contextlib import aclosing
from typing import Any, Generic, TypeVar

from dstl.errors import DstlError

T = TypeVar("T")
R = TypeVar("R")

_log = logging.getLogger(__name__)


class BudgetLease:
    """The bytes that the work on one item holds beside the item's cost.

    Given back when the next result is asked for, or by the work itself.
    """

    __slots__ = ("_ahead", "cost", "item", "number", "taken")

    def __init__(self, ahead: Prefetcher[Any, Any], number: int, item: Any, cost: int) -> None:
        self._ahead = ahead
        self.number = number
        self.item = item
        self.cost = cost
        self.taken = 0

    async def take(self, nbytes: int) -> None:
        """Count bytes as soon as there is room for them; at once when this item's result is the next."""
        while not self.try_take(nbytes):
            if self.number == self._ahead.due:
                self._count(nbytes)
                return
            await self._ahead.change()

    def try_take(self, nbytes: int) -> bool:
        """Count bytes if there is room for them."""
        fits = self._ahead.taken + nbytes <= self._ahead.max_taken
        if fits:
            self._count(nbytes)
        return fits

    def give_back(self, nbytes: int | None = None) -> None:
        """Forget bytes that were taken; by default all."""
        self._count(-(self.taken if nbytes is None else nbytes))
        self._ahead.changed()

    def _count(self, nbytes: int) -> None:
        self.taken += nbytes
        self._ahead.taken += nbytes


class Prefetcher(Generic[T, R]):
    """An async iterator over the results of work on items, which begins at once. One event loop.

    Invariants:
        1. Results come in the order of their items; an error comes in its item's place, that of ``items`` after all
           results.
        2. Of what was not asked for yet, at most ``max_count`` items are worked on or done; they, and the one that
           was returned last, cost at most ``max_bytes`` and have taken at most ``max_taken``. The next result is
           exempt, so that it always comes, whatever it costs.
        3. After :meth:`aclose` nothing runs any more.

    Args:
        items: Taken one after the other; closed at the end if it is a generator.
        work: Makes the result of an item; is told where to count bytes that it makes.
        cost: Bytes that count for an item from the beginning of its work on.
        max_bytes: Of costs.
        max_count: Of items; None for no bound.
        max_taken: Of bytes that work counts.
        discard: Told by :meth:`aclose` of each item whose result was not taken.
    """

    def __init__(
        self,
        items: AsyncGenerator[T] | Iterable[T],
        work: Callable[[T, BudgetLease], Awaitable[R]],
        *,
        cost: Callable[[T], int],
        max_bytes: int,
        max_count: int | None = None,
        max_taken: int = 0,
        discard: Callable[[T], None] | None = None,
    ) -> None:
        self.max_taken = max_taken
        self.taken = 0
        self.due = 0
        self._items = items if isinstance(items, AsyncGenerator) else _each(items)
        self._work = work
        self._cost = cost
        self._max_bytes = max_bytes
        self._max_count = max_count
        self._discard = discard
        self._held = 0
        self._waiting: BudgetLease | None = None
        self._begun: deque[tuple[BudgetLease, asyncio.Future[R]]] = deque()
        self._returned: BudgetLease | None = None
        self._change = asyncio.Event()
        self._all_begun = asyncio.ensure_future(self._begin_all())
        self._all_begun.add_done_callback(lambda _: self.changed())

    def __aiter__(self) -> Prefetcher[T, R]:
        return self

    async def __anext__(self) -> R:
        if self._returned is not None:
            self._end(self._returned)
            self._returned = None
        while not self._begun:
            if self._all_begun.done():
                await self._all_begun
                raise StopAsyncIteration
            await self.change()
        lease, running = self._begun[0]
        try:
            result = await running
        finally:
            self._begun.popleft()
            self._returned = lease
            self.changed()
        return result

    async def aclose(self) -> None:
        """Cancel what runs and wait for its end. Idempotent."""
        running: list[asyncio.Future[Any]] = [self._all_begun, *(future for _, future in self._begun)]
        for each in running:
            each.cancel()
        for error in await asyncio.gather(*running, return_exceptions=True):
            if isinstance(error, Exception) and not isinstance(error, DstlError):
                _log.warning("work that was given up has failed", exc_info=error)
        left = [lease for lease, _ in self._begun] + ([self._waiting] if self._waiting is not None else [])
        self._begun.clear()
        self._waiting = None
        if self._discard is not None:
            for lease in left:
                self._discard(lease.item)

    async def change(self) -> None:
        """Wait until bytes were given back, an item has become due or work has begun."""
        self._change.clear()
        await self._change.wait()

    def changed(self) -> None:
        """Wake those that wait."""
        self._change.set()

    async def _begin_all(self) -> None:
        number = 0
        async with aclosing(self._items) as items:
            async for item in items:
                lease = self._waiting = BudgetLease(self, number, item, self._cost(item))
                while not self._may_begin(lease):
                    await self.change()
                self._waiting = None
                self._held += lease.cost
                self._begun.append((lease, asyncio.ensure_future(self._work(item, lease))))
                self.changed()
                number += 1

    def _may_begin(self, lease: BudgetLease) -> bool:
        few = self._max_count is None or len(self._begun) < self._max_count
        return lease.number == self.due or (few and self._held + lease.cost <= self._max_bytes)

    def _end(self, lease: BudgetLease) -> None:
        self._held -= lease.cost
        self.due = lease.number + 1
        lease.give_back()


async def _each(items: Iterable[T]) -> AsyncGenerator[T]:
    for item in items:
        yield item
