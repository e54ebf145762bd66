"""Detection of queues: a PUT that no younger one overtakes waits with the others, and is not late alone.

When latencies are independent, nearly all PUTs that began a little after a late one are finished before it. When the
store is at its capacity they queue behind it, and hardly any are: then a hedge only lengthens the queue. No absolute
latency is needed for this, so it also holds for a store that was overloaded from the first PUT on.

Measured on the latency model: 0.82 to 0.96 overtake in stores without a queue, however heavy their tails; 0.29 to 0.53
in stores at 90 to 97 % of their capacity.
"""

from __future__ import annotations

from collections import deque

__all__ = ["Overtaking", "Ticket"]

_KEPT = 512
_MEMORY = 32
_NONE_BELOW = 0.6
_ALL_ABOVE = 0.78
_LEAST = 1 / 64


class Ticket:
    """One upload, as the policy sees it.

    Attributes:
        began: Clock time of its first attempt.
        size: Bytes.
        done: Whether it is over.
        outlived: Whether its first attempt has outlived the delay.
        busy: Whether it began while the process sent more than it uses to.
    """

    __slots__ = ("began", "busy", "done", "outlived", "size")

    def __init__(self, began: float, size: int) -> None:
        self.began = began
        self.size = size
        self.done = False
        self.outlived = False
        self.busy = False


class Overtaking:
    """Share of later PUTs that overtake a late one, over the last few dozen late ones."""

    __slots__ = ("_recent", "_seen", "share")

    def __init__(self) -> None:
        self._recent: deque[Ticket] = deque(maxlen=_KEPT)
        self.share = 1.0
        self._seen = 0

    def began(self, now: float, size: int) -> Ticket:
        """An upload begins."""
        ticket = Ticket(now, size)
        self._recent.append(ticket)
        return ticket

    def late(self, now: float, ticket: Ticket, median: float) -> None:
        """Look who overtook an upload that is over and was late.

        Asked are the PUTs of its size class that began within one median after it and are at least one median old.
        """
        kind = ticket.size.bit_length()
        asked = overtook = 0
        for other in reversed(self._recent):
            if other.began <= ticket.began:
                break
            if other.began - ticket.began <= median <= now - other.began and other.size.bit_length() == kind:
                asked += 1
                overtook += other.done
        if asked:
            self._seen += 1
            self.share += (overtook / asked - self.share) / min(_MEMORY, 4 + self._seen)

    @property
    def portion(self) -> float:
        """The share of the usual hedging that is sensible: a power of two in [1/64, 1]."""
        wanted = (self.share - _NONE_BELOW) / (_ALL_ABOVE - _NONE_BELOW)
        portion = 1.0
        while portion > _LEAST and wanted < portion:
            portion /= 2
        return portion
