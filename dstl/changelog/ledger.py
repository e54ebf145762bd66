"""Ownership of the sequence numbers of one log: the pure decisions behind the writer (FLIP-158, "DSTL writer").

A change set is *buffered* (its bytes wait here), *in flight* (sealed into a segment that is being stored), *handed
out* (sealed small and given to the coordinator, which writes it inside its manifest) or *durable* (a stored object
holds it). Its bytes are kept until it is durable, so a failed upload only puts it back among the buffered ones.

No I/O and no clock: ``storage.py`` seals, ``segments_in_flight.py`` reports how each seal ended.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from dstl.changelog.log_segment import InlineSegment, LogSegment, SegmentReferences, join_segments
from dstl.changelog.throttle import ByteBudget
from dstl.errors import Invalid
from handles.segment_handle import INITIAL_SQN, SegmentHandle, SequenceNumber, SequenceNumberRange

P = TypeVar("P")


class Ownership(enum.Enum):
    """The four places where a change set can be; it is in exactly one."""

    BUFFERED = "buffered"
    IN_FLIGHT = "in flight"
    HANDED_OUT = "handed out"
    DURABLE = "durable"


@dataclass(slots=True, eq=False)
class _Entry(Generic[P]):
    sqn: SequenceNumber
    changes: P | None
    nbytes: int
    state: Ownership = Ownership.BUFFERED
    seal: int | None = None  # while it waits for one
    inline: InlineSegment | None = None  # the last seal in which it was handed out
    location: SegmentHandle | None = None
    owned: bool = False  # the coordinator's: a confirmed checkpoint references it
    claims: int = 0  # persists that are neither confirmed nor reset
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
        3. What a persist covers that is neither confirmed nor reset is *claimed*: truncation waits for it, and its
           object is not deleted, for a checkpoint may reference it (FLINK-28440).
        4. What the coordinator owns is never released to deletion here.

    Attributes:
        next_sqn: The number that the next change set will get.
        buffered_bytes: Bytes of the change sets in state *buffered*.

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
        self._lowest = self.next_sqn = INITIAL_SQN
        self._open_claims: list[SequenceNumberRange] = []
        self._buffered: dict[SequenceNumber, _Entry[P]] = {}
        self.buffered_bytes = 0

    def ownership(self, sqn: SequenceNumber) -> Ownership | None:
        """Return the state of a change set; None for one that is truncated or not there yet."""
        entry = self._entries.get(sqn)
        return entry.state if entry is not None and not entry.truncated else None

    def find(self, sqn: SequenceNumber) -> P | SegmentHandle:
        """Return a change set, or where it lies once its bytes are kept here no longer."""
        entry = self._entries[sqn]
        if entry.changes is not None:
            return entry.changes
        assert entry.location is not None
        return entry.location

    def add(self, changes: P, nbytes: int) -> SequenceNumber:
        """Take a closed, non-empty change set and return its number. Its bytes are in the budget already."""
        sqn = self.next_sqn
        self._entries[sqn] = entry = _Entry(sqn, changes, nbytes)
        self._buffer(entry)
        self.next_sqn += 1
        return sqn

    def claim(self, from_sqn: SequenceNumber) -> SequenceNumberRange:
        """Claim ``[from_sqn, next)`` for a persist and then its checkpoint; return that range.

        The persist ends with :meth:`segments` or :meth:`withdraw`, its checkpoint with :meth:`confirm` or
        :meth:`reset`.

        Raises:
            Invalid: The range was truncated, or begins beyond what was appended.
        """
        if from_sqn < self._lowest:
            raise Invalid(f"log {self.log_id}: changes from {from_sqn} were truncated up to {self._lowest}")
        if from_sqn > self.next_sqn:
            raise Invalid(f"log {self.log_id}: changes from {from_sqn} are not appended yet, next is {self.next_sqn}")
        wanted = SequenceNumberRange(from_sqn, self.next_sqn)
        for entry in self._within(wanted):
            entry.claims += 1
        self._open_claims.append(wanted)
        return wanted

    def withdraw(self, wanted: SequenceNumberRange) -> None:
        """The persist that claimed this range has failed: no checkpoint references it."""
        if wanted in self._open_claims:  # else the log was closed
            self._open_claims.remove(wanted)
            self.reset(wanted)

    def take_back(self, wanted: SequenceNumberRange) -> None:
        """Buffer what was handed out of this range, for a persist that wants it in an object."""
        for entry in self._within(wanted):
            if entry.state is Ownership.HANDED_OUT:
                self._buffer(entry)
                self._budget.take(entry.nbytes)

    def buffered(self, wanted: SequenceNumberRange | None = None) -> list[tuple[SequenceNumber, int]]:
        """Return number and bytes of the buffered change sets, in order; of a range, or of all."""
        return [(sqn, self._buffered[sqn].nbytes) for sqn in sorted(self._buffered) if wanted is None or sqn in wanted]

    def in_flight(self, wanted: SequenceNumberRange) -> set[int]:
        """Return the seals that the change sets of a range are in flight in."""
        return {entry.seal for entry in self._within(wanted) if entry.seal is not None}

    def segments(self, wanted: SequenceNumberRange) -> tuple[LogSegment, ...]:
        """Return where a claimed range lies, in order and without a gap: nothing of it is buffered or in flight."""
        self._open_claims.remove(wanted)
        return join_segments((entry.sqn, entry.place, entry.nbytes) for entry in self._within(wanted))

    def seal(self, seal: int, sqns: Iterable[SequenceNumber]) -> list[tuple[SequenceNumber, P]]:
        """Move buffered change sets into a seal; return what is to be encoded."""
        taken: list[tuple[SequenceNumber, P]] = []
        for sqn in sqns:
            entry = self._buffered.pop(sqn)
            assert entry.changes is not None
            self.buffered_bytes -= entry.nbytes
            entry.state, entry.seal = Ownership.IN_FLIGHT, seal
            self._sealed.setdefault(seal, []).append(entry)
            taken.append((sqn, entry.changes))
        return taken

    def needs(self, seal: int) -> bool:
        """True while a change set still waits for this seal; False once all were dropped or became durable."""
        return any(entry.seal is not None for entry in self._sealed.get(seal, ()))

    def stored(self, seal: int, handle: SegmentHandle) -> None:
        """The seal's object is in the store."""
        for entry in self._sealed.pop(seal, ()):
            if self._still_waits(entry):
                entry.state, entry.location, entry.changes, entry.seal = Ownership.DURABLE, handle, None, None
                self._budget.give_back(entry.nbytes)
            else:
                self._references.release(handle.name)

    def handed_out(self, seal: int, inline: InlineSegment) -> None:
        """The seal is small and goes to the coordinator; what no persist claims any more is buffered again."""
        for entry in self._sealed.pop(seal, ()):
            if not self._still_waits(entry):
                continue
            if not entry.claims:
                self._buffer(entry)
                continue
            entry.state, entry.inline, entry.seal = Ownership.HANDED_OUT, inline, None
            # Small and confirmed by someone who may wait for appends to get in: not a reason to hold those back.
            self._budget.give_back(entry.nbytes)

    def failed(self, seal: int) -> None:
        """The seal was not stored: its change sets are buffered again."""
        for entry in self._sealed.pop(seal, ()):
            if self._still_waits(entry):
                self._buffer(entry)

    def confirm(self, wanted: SequenceNumberRange, located: Mapping[str, SegmentHandle]) -> None:
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

    def reset(self, wanted: SequenceNumberRange) -> None:
        """A checkpoint was aborted: what is durable stays so, what was inlined is buffered."""
        self.take_back(wanted)
        for entry in self._within(wanted):
            entry.claims = max(0, entry.claims - 1)
            self._forget_truncated(entry)

    def truncate(self, to_sqn: SequenceNumber) -> None:
        """``[.., to_sqn)`` is no longer needed. What is claimed goes when its claim ends.

        Raises:
            Invalid: ``to_sqn`` is beyond what was appended.
        """
        if to_sqn > self.next_sqn:
            raise Invalid(f"log {self.log_id}: cannot truncate to {to_sqn}, next is {self.next_sqn}")
        if to_sqn <= self._lowest:
            return
        for entry in self._within(SequenceNumberRange(self._lowest, to_sqn)):
            entry.truncated = True
            self._forget_truncated(entry)
        self._lowest = to_sqn

    def close(self) -> None:
        """Drop every change set. Idempotent.

        Objects are released for deletion, except for what is claimed and not by an open persist: a checkpoint may
        reference that, so it is left to the coordinator and its cleaner.
        """
        for wanted in list(self._open_claims):
            self.withdraw(wanted)
        for entry in list(self._entries.values()):
            if entry.claims and entry.state is Ownership.DURABLE:
                self._own(entry)
            self._drop(entry)

    def _within(self, wanted: SequenceNumberRange) -> list[_Entry[P]]:
        found = (self._entries.get(sqn) for sqn in range(wanted.from_sqn, min(wanted.to_sqn, self.next_sqn)))
        return [entry for entry in found if entry is not None]

    def _still_waits(self, entry: _Entry[P]) -> bool:
        """Say whether a sealed entry still waits for its seal; one that was dropped meanwhile frees its bytes."""
        if entry.seal is not None:
            return True
        entry.changes = None
        self._budget.give_back(entry.nbytes)
        return False

    def _buffer(self, entry: _Entry[P]) -> None:
        entry.state, entry.seal = Ownership.BUFFERED, None
        self._buffered[entry.sqn] = entry
        self.buffered_bytes += entry.nbytes

    def _unbuffer(self, entry: _Entry[P]) -> None:
        del self._buffered[entry.sqn]
        self.buffered_bytes -= entry.nbytes
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
        entry.seal = None
        match entry.state:
            case Ownership.BUFFERED:
                self._unbuffer(entry)
            case Ownership.DURABLE if not entry.owned and entry.location is not None:
                self._references.release(entry.location.name)
            case _:  # in flight: its arrival finds it gone; handed out: only a manifest may hold it
                pass
