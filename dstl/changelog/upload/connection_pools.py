"""Connections of first attempts and of hedges, which first attempts keep warm."""

from __future__ import annotations

from collections.abc import Sequence

from dstl.store.base import ObjectStore


class ConnectionPools:
    """Two stores at one location, each with connections of its own.

    A hedge that waits in the queue of the pool that its first attempt is stuck in helps nobody, and one that has to
    connect first comes later. A losing hedge closes its connection, and the store closes an idle one; so a first
    attempt is sent over the hedges' pool whenever that is believed cold, at the cost of that attempt's connect.

    Args:
        store: For first attempts and retries.
        hedge_store: For hedges; the same store when there is but one pool.
        warm_after_s: Seconds without a request after which the hedges' pool counts as cold.
        now: The clock's time.
    """

    def __init__(self, store: ObjectStore, hedge_store: ObjectStore, warm_after_s: float, now: float) -> None:
        self.stores = (store, hedge_store)
        self._warm_after = warm_after_s
        self._used = now
        self._open = 0

    def choose(self, now: float, busy: Sequence[int], *, first: bool) -> int:
        """Return the index of the store for a new request.

        Args:
            now: The clock's time.
            busy: Pools of the upload's active attempts, the youngest last.
            first: Whether it is a first attempt, which may warm the hedges' pool.
        """
        cold = self._open == 0 or now - self._used > self._warm_after
        pool = 1 - busy[-1] if busy else int(first and cold)
        if pool:
            self._used = now
            self._open = max(1, self._open)
        return pool

    def closed_one(self, pool: int) -> None:
        """A request over this pool was cancelled, and its connection with it."""
        if pool:
            self._open = max(0, self._open - 1)
