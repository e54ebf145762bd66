"""Ownership of the sequence numbers of one log: the pure decisions behind the writer (FLIP-158, "DSTL writer").

A change set is *buffered* (its bytes wait here), *in flight* (sealed into a segment that is being stored), *handed
out* (sealed small and given to the coordinator, which writes it inside its manifest) or *durable* (a stored object
holds it). Its bytes are kept until it is durable, so a failed upload only puts it back among the buffered ones.

No I/O and no clock: each event returns the persists that it settled; ``segments_in_flight.py`` and ``writer.py`` act on
them.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from dstl.changelog.log_segment import InlineSegment, LogSegment, SegmentReferences, join_segments
from dstl.changelog.throttle import ByteBudget
from dstl.errors import Closed, Invalid
from handles.segment_handle import SegmentHandle
from handles.sequence_number import INITIAL_SQN, SequenceNumber, SequenceNumberRange

__all__ = ["InlineSegment", "LogLedger", "LogSegment", "Ownership", "PersistTicket"]

P = TypeVar("P")


class Ownership(enum.Enum):
    """The four places where a change set can be; it is in exactly one."""

    BUFFERED = "buffered"
    IN_FLIGHT = "in flight"
    HANDED_OUT = "handed out"
    DURABLE = "durable"


@dataclass(slots=True, eq=False)
class PersistTicket:
    """One call of ``persist`` that waits for its range.

    Attributes:
        wanted: The range asked for.
        inline: The caller takes inlined seals.
        joined: Seals that were in flight when it asked: their failure is not this persist's own.
        result: The segments in order without a gap, once settled well.
        error: Why it failed, once settled badly.
    """

    wanted: SequenceNumberRange
    inline: bool
    joined: frozenset[int]
    result: tuple[LogSegment, ...] | None = None
    error: BaseException | None = None

    @property
    def settled(self) -> bool:
        """True once ``result`` or ``error`` is set."""
        return self.result is not None or self.error is not None


@dataclass(slots=True, eq=False)
class _Entry(Generic[P]):
    sqn: SequenceNumber
    changes: P | None
    nbytes: int
    state: Ownership = Ownership.BUFFERED
    seal: int | None = None
    inline: InlineSegment | None = None  # the last seal in which it was handed out
    location: SegmentHandle | None = None
    owned: bool = False  # the coordinator's: a confirmed checkpoint references it
    claims: int = 0  # persists that are open, or whose result is neither confirmed nor reset
    truncated: bool = False

    @property
    def place(self) -> SegmentHandle | InlineSegment:
        place = self.inline if self.state is Ownership.HANDED_OUT else self.location
        assert place is not None
        return place


class LogLedger(Generic[P]):
    """The change sets of one log from the lowest one still needed to the next number.

    Invariants:
        1. Every number below ``next_sqn`` that is not truncated is in exactly one :class:`Ownership` state.
        2. Bytes are kept until the change set is durable, and at most one upload of it succeeds.
        3. What an open persist covers, or a persist has returned and nobody has confirmed or reset, is *claimed*:
           truncation waits for it, and its object is not deleted, for a checkpoint may reference it (FLINK-28440).
        4. What the coordinator owns is never released to deletion here.
        5. An open ticket is settled by an event, or by :meth:`close`; it fails only with the error of a seal that was
           made after it asked, so another's failed upload is tried again on its behalf.

    Args:
        log_id: The log's name, for messages.
        references: Shared by all logs of a storage: counts the change sets in each unconfirmed object.
        budget: Shared by all logs of a storage: bytes not yet durable.
    """

    def __init__(self, log_id: str, references: SegmentReferences, budget: ByteBudget) -> None:
        self.log_id = log_id
        self._references = references
        self._budget = budget
        self._entries: dict[SequenceNumber, _Entry[P]] = {}
        self._sealed: dict[int, list[_Entry[P]]] = {}
        self._open: list[PersistTicket] = []
        self._lowest = self._next = INITIAL_SQN
        self._buffered: dict[SequenceNumber, _Entry[P]] = {}
        self._buffered_bytes = 0
        self._closed = False

    @property
    def next_sqn(self) -> SequenceNumber:
        """The number that the next change set will get."""
        return self._next

    @property
    def buffered_bytes(self) -> int:
        """Bytes of the change sets in state *buffered*."""
        return self._buffered_bytes

    @property
    def waiting(self) -> bool:
        """True while a persist is open."""
        return bool(self._open)

    @property
    def in_flight(self) -> tuple[int, ...]:
        """The seals that hold something of this log."""
        return tuple(self._sealed)

    def ownership(self, sqn: SequenceNumber) -> Ownership | None:
        """Return the state of a change set; None for one that is truncated or not there yet."""
        entry = self._entries.get(sqn)
        return entry.state if entry is not None and not entry.truncated else None

    def held(self) -> Iterator[tuple[SequenceNumber, P]]:
        """Yield number and changes of every change set that is not durable: nothing else keeps its bytes."""
        for sqn, entry in self._entries.items():
            if entry.changes is not None:
                yield sqn, entry.changes

    def add(self, changes: P, nbytes: int) -> SequenceNumber:
        """Take a closed, non-empty change set and return its number. Its bytes are in the budget already.

        Raises:
            Closed: The log was closed.
        """
        self._check_open()
        sqn = self._next
        self._entries[sqn] = entry = _Entry(sqn, changes, nbytes)
        self._buffer(entry)
        self._next += 1
        return sqn

    def ask(self, from_sqn: SequenceNumber, *, inline: bool) -> PersistTicket:
        """Open a persist of ``[from_sqn, next)``; it may be settled when this returns.

        Raises:
            Closed: The log was closed.
            Invalid: The range was truncated, or begins beyond what was appended.
        """
        self._check_open()
        if from_sqn < self._lowest:
            raise Invalid(f"log {self.log_id}: changes from {from_sqn} were truncated up to {self._lowest}")
        if from_sqn > self._next:
            raise Invalid(f"log {self.log_id}: changes from {from_sqn} are not appended yet, next is {self._next}")
        entries = [self._entries[sqn] for sqn in range(from_sqn, self._next)]
        for entry in entries:
            entry.claims += 1
            if entry.state is Ownership.HANDED_OUT and not inline:
                self._take_back(entry)
        joined = frozenset(e.seal for e in entries if e.state is Ownership.IN_FLIGHT and e.seal is not None)
        ticket = PersistTicket(SequenceNumberRange(from_sqn, self._next), inline, joined)
        self._open.append(ticket)
        self._settle_ready()
        return ticket

    def unsealed(self, *, everything: bool = False) -> list[tuple[SequenceNumber, int]]:
        """Return number and bytes of the buffered change sets that an open persist covers, or of all; in order."""
        low = 0 if everything else min((t.wanted.from_sqn for t in self._open), default=self._next)
        high = self._next if everything else max((t.wanted.to_sqn for t in self._open), default=self._next)
        return [(sqn, self._buffered[sqn].nbytes) for sqn in sorted(self._buffered) if low <= sqn < high]

    def seal(self, seal: int, sqns: Iterable[SequenceNumber]) -> list[tuple[SequenceNumber, P]]:
        """Move buffered change sets into a seal; return what is to be encoded."""
        taken: list[tuple[SequenceNumber, P]] = []
        for sqn in sqns:
            entry = self._buffered.pop(sqn)
            assert entry.changes is not None
            self._buffered_bytes -= entry.nbytes
            entry.state, entry.seal = Ownership.IN_FLIGHT, seal
            self._sealed.setdefault(seal, []).append(entry)
            taken.append((sqn, entry.changes))
        return taken

    def needs(self, seal: int) -> bool:
        """True while a change set still waits for this seal; False once all were dropped or became durable."""
        return any(self._waits(entry) for entry in self._sealed.get(seal, ()))

    def may_inline(self, seal: int) -> bool:
        """True if every persist that waits for this seal takes inlined ones, and at least one does wait."""
        sqns = [entry.sqn for entry in self._sealed.get(seal, ()) if self._waits(entry)]
        waiting = [t for t in self._open if any(sqn in t.wanted for sqn in sqns)]
        return bool(waiting) and all(t.inline for t in waiting)

    def critical(self, seal: int) -> bool:
        """True if a persist waits for this seal."""
        return any(entry.sqn in t.wanted for entry in self._sealed.get(seal, ()) for t in self._open)

    def stored(self, seal: int, handle: SegmentHandle) -> list[PersistTicket]:
        """The seal's object is in the store; return the persists that this settled."""
        for entry in self._sealed.pop(seal, ()):
            if self._still_waits(entry):
                self._make_durable(entry, handle)
            else:
                self._references.release(handle.name)
        return self._settle_ready()

    def handed_out(self, seal: int, inline: InlineSegment) -> list[PersistTicket]:
        """The seal is small and goes to the coordinator; return the persists that this settled."""
        for entry in self._sealed.pop(seal, ()):
            if self._still_waits(entry):
                entry.state, entry.inline, entry.seal = Ownership.HANDED_OUT, inline, None
                # Small and confirmed by someone who may wait for appends to get in: not a reason to hold those back.
                self._budget.give_back(entry.nbytes)
        return self._settle_ready()

    def failed(self, seal: int, error: BaseException) -> list[PersistTicket]:
        """The seal was not stored: its change sets are buffered again; return the persists that failed with it."""
        sqns = []
        for entry in self._sealed.pop(seal, ()):
            if self._still_waits(entry):
                self._buffer(entry)
                sqns.append(entry.sqn)
        hit = [t for t in self._open if seal not in t.joined and any(sqn in t.wanted for sqn in sqns)]
        return [self._fail(ticket, error) for ticket in hit]

    def abandon(self, ticket: PersistTicket, error: BaseException) -> None:
        """The caller of a persist no longer waits."""
        if not ticket.settled:
            self._fail(ticket, error)

    def confirm(self, wanted: SequenceNumberRange, located: Mapping[str, SegmentHandle]) -> list[PersistTicket]:
        """A completed checkpoint references this range: the coordinator owns its segments from now on.

        Args:
            wanted: The range that a persist returned.
            located: Where the manifest holds each inlined seal, by the seal's id.

        Raises:
            Invalid: A change set of the range is not durable and no place was given for it. Nothing was changed.
        """
        entries = self._within(wanted)
        for entry in entries:
            named = entry.inline is not None and entry.inline.id in located
            if entry.state is not Ownership.DURABLE and not named:
                raise Invalid(
                    f"log {self.log_id}: change set {entry.sqn} is {entry.state.value}, a checkpoint cannot own it"
                )
        for entry in entries:
            entry.claims = max(0, entry.claims - 1)
            place = located.get(entry.inline.id) if entry.inline is not None else None
            if place is None:
                self._own(entry)
            elif entry.state is not Ownership.DURABLE:
                self._record_place(entry, place)
            # else: durable elsewhere meanwhile, and it is the inlined copy that this checkpoint references.
            self._forget_truncated(entry)
        return self._settle_ready()

    def reset(self, wanted: SequenceNumberRange) -> None:
        """A checkpoint was aborted: what is durable is kept for the next persist, what was inlined is buffered."""
        for entry in self._within(wanted):
            entry.claims = max(0, entry.claims - 1)
            if entry.state is Ownership.HANDED_OUT:
                self._take_back(entry)
            self._forget_truncated(entry)

    def truncate(self, to_sqn: SequenceNumber) -> None:
        """Nobody needs ``[.., to_sqn)`` any more. What is claimed goes when its claim ends.

        Raises:
            Invalid: ``to_sqn`` is beyond what was appended.
        """
        if to_sqn > self._next:
            raise Invalid(f"log {self.log_id}: cannot truncate to {to_sqn}, next is {self._next}")
        if to_sqn <= self._lowest:
            return
        for entry in self._within(SequenceNumberRange(self._lowest, to_sqn)):
            entry.truncated = True
            self._forget_truncated(entry)
        self._lowest = to_sqn

    def close(self, why: Closed) -> list[PersistTicket]:
        """Drop every change set and fail every open persist; return those. Idempotent.

        Objects are released for deletion, except for what is claimed: a checkpoint may reference that, so it is left
        to the coordinator and its cleaner.
        """
        self._closed = True
        failed = [self._fail(ticket, why) for ticket in list(self._open)]
        for entry in list(self._entries.values()):
            if entry.claims and entry.state is Ownership.DURABLE:
                self._own(entry)
            self._drop(entry)
        return failed

    def _check_open(self) -> None:
        if self._closed:
            raise Closed(f"log {self.log_id} is closed: create a writer for a new log")

    def _within(self, wanted: SequenceNumberRange) -> list[_Entry[P]]:
        found = (self._entries.get(sqn) for sqn in range(wanted.from_sqn, min(wanted.to_sqn, self._next)))
        return [entry for entry in found if entry is not None]

    def _waits(self, entry: _Entry[P]) -> bool:
        return entry.state is Ownership.IN_FLIGHT and self._entries.get(entry.sqn) is entry

    def _still_waits(self, entry: _Entry[P]) -> bool:
        """Say whether a sealed entry still waits for its seal; one that was dropped meanwhile frees its bytes."""
        if self._waits(entry):
            return True
        entry.changes = None
        self._budget.give_back(entry.nbytes)
        return False

    def _buffer(self, entry: _Entry[P]) -> None:
        entry.state, entry.seal = Ownership.BUFFERED, None
        self._buffered[entry.sqn] = entry
        self._buffered_bytes += entry.nbytes

    def _unbuffer(self, entry: _Entry[P]) -> None:
        del self._buffered[entry.sqn]
        self._buffered_bytes -= entry.nbytes
        self._budget.give_back(entry.nbytes)

    def _take_back(self, entry: _Entry[P]) -> None:
        self._buffer(entry)
        self._budget.take(entry.nbytes)

    def _make_durable(self, entry: _Entry[P], handle: SegmentHandle) -> None:
        entry.state, entry.location, entry.changes, entry.seal = Ownership.DURABLE, handle, None, None
        self._budget.give_back(entry.nbytes)

    def _record_place(self, entry: _Entry[P], place: SegmentHandle) -> None:
        """A manifest holds the entry. Bytes of one that is in flight again stay in the budget until that ends."""
        if entry.state is Ownership.BUFFERED:
            self._unbuffer(entry)
        entry.state, entry.location, entry.owned = Ownership.DURABLE, place, True
        entry.changes = entry.seal = None

    def _own(self, entry: _Entry[P]) -> None:
        if not entry.owned and entry.location is not None:
            entry.owned = True
            self._references.give_up(entry.location.name)

    def _forget_truncated(self, entry: _Entry[P]) -> None:
        if entry.truncated and not entry.claims:
            self._drop(entry)

    def _drop(self, entry: _Entry[P]) -> None:
        del self._entries[entry.sqn]
        match entry.state:
            case Ownership.BUFFERED:
                self._unbuffer(entry)
            case Ownership.DURABLE if not entry.owned and entry.location is not None:
                self._references.release(entry.location.name)
            case _:  # in flight: its arrival finds it gone; handed out: only a manifest may hold it
                pass

    def _settle_ready(self) -> list[PersistTicket]:
        settled = []
        for ticket in list(self._open):
            entries = self._within(ticket.wanted)
            if all(e.state in (Ownership.DURABLE, Ownership.HANDED_OUT) for e in entries):
                self._open.remove(ticket)
                ticket.result = join_segments((e.sqn, e.place, e.nbytes) for e in entries)
                settled.append(ticket)
        return settled

    def _fail(self, ticket: PersistTicket, error: BaseException) -> PersistTicket:
        self._open.remove(ticket)
        ticket.error = error
        for entry in self._within(ticket.wanted):
            entry.claims = max(0, entry.claims - 1)
            self._forget_truncated(entry)
        return ticket
