"""The changelog writer of one operator and partition (FLIP-158, ``StateChangelogWriter``)."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Mapping
from functools import partial
from typing import Protocol

import pyarrow as pa

from dstl.changelog.change_set import ChangeSet
from dstl.changelog.ledger import LogLedger, PersistTicket
from dstl.changelog.log_segment import LogSegment, SegmentReferences
from dstl.changelog.throttle import ByteBudget
from dstl.errors import Closed, DstlError, Invalid
from handles.segment_handle import SegmentHandle
from handles.sequence_number import SequenceNumber, SequenceNumberRange

__all__ = ["StateChangelogWriter", "WriterHost"]


class WriterHost(Protocol):
    """The part of a storage that its writers call."""

    budget: ByteBudget
    references: SegmentReferences
    loop: asyncio.AbstractEventLoop

    def touched(self, writer: StateChangelogWriter) -> None:
        """The writer holds more or less than before; look at it soon."""
        ...

    def encode_ahead(self, log_id: str, sqn: SequenceNumber, changes: ChangeSet) -> None:
        """Encode a closed change set before a persist asks for it, where that is worth it."""
        ...

    def closed(self, writer: StateChangelogWriter) -> None:
        """The writer was closed."""
        ...


class StateChangelogWriter:
    """One log: append changes, persist them, truncate them. Made by ``StateChangelogStorage.create_writer``.

    Invariants:
        1. Appends never move the sequence number; ``next_sequence_number`` and ``persist`` move it by one, and
           only when something was appended since. A pre-emptive upload closes change sets too, between appends.
        2. A change set's bytes are kept until a stored object or a completed checkpoint holds them.
        3. Every future that ``persist`` returned is settled at the latest by ``close``.

    One event loop only; calls do not wait unless they return an awaitable.

    Args:
        log_id: Unique per incarnation: of operator, key groups and owner.
        host: The storage.
    """

    def __init__(self, log_id: str, host: WriterHost) -> None:
        self.log_id = log_id
        self.ledger: LogLedger[ChangeSet] = LogLedger(log_id, host.references, host.budget)
        self._host = host
        self._open = ChangeSet()
        self._accounted = 0
        self._touched = False
        self._closed = False
        self._futures: dict[PersistTicket, asyncio.Future[tuple[LogSegment, ...]]] = {}

    def append_batch(self, batch: pa.RecordBatch) -> None:
        """Append changes as columns of ``CHANGE_SCHEMA``; the batch must not change afterwards.

        Raises:
            Closed: The writer was closed; nothing was taken.
            Invalid: Not changes. Nothing was appended.
        """
        if self._closed:
            raise self._closed_error()
        self._open.append_batch(batch)
        if not self._touched:
            self._touch()

    def append_metadata(self, blob: bytes) -> None:
        """Append non-keyed metadata (state schemas), which every reader of the log gets in its place.

        Raises:
            Closed: The writer was closed.
        """
        if self._closed:
            raise self._closed_error()
        self._open.append_metadata(blob)
        if not self._touched:
            self._touch()

    def next_sequence_number(self) -> SequenceNumber:
        """Close the open change set if it is not empty, and return the number that the next one will have.

        The FLIP's ``lastAppendedSqn``: everything appended so far is below the returned number.

        Raises:
            Closed: The writer was closed.
        """
        if self._closed:
            raise self._closed_error()
        self._roll()
        return self.ledger.next_sqn

    def encode_ahead(self) -> None:
        """Close the open change set if it is not empty, and encode it while nobody waits for it.

        For a caller that will append no more before the next persist. What it appends all the same is encoded with it
        again then.

        Raises:
            Closed: The writer was closed.
        """
        sqn, changes = self.ledger.next_sqn, self._open
        if self.next_sequence_number() > sqn:
            self._host.encode_ahead(self.log_id, sqn, changes)

    def persist(
        self, from_sqn: SequenceNumber, *, allow_inline: bool = False
    ) -> asyncio.Future[tuple[LogSegment, ...]]:
        """Make everything from ``from_sqn`` (inclusive) to now durable. The FLIP's ``persistDurably``.

        What is durable already is reused, what is on its way is waited for. The range counts as referenced by a
        checkpoint until :meth:`confirm` or :meth:`reset` is called for it.

        Args:
            from_sqn: First change set wanted: usually where the last materialization ended.
            allow_inline: Take small seals as bytes (``InlineSegment``) that the caller makes durable itself.

        Returns:
            A future of the segments: ordered, without a gap, covering ``[from_sqn, next)``; empty when that is.
            It fails with the error of an upload of its own; the changes are kept and it can be asked again at once.

        Raises:
            Closed: The writer was closed; so does the future when it is closed later.
            Invalid: The range was truncated or is not there yet.
        """
        if self._closed:
            raise self._closed_error()
        self._roll()
        ticket = self.ledger.ask(from_sqn, inline=allow_inline)
        future: asyncio.Future[tuple[LogSegment, ...]] = self._host.loop.create_future()
        future.add_done_callback(partial(self._future_done, ticket))
        self._futures[ticket] = future
        if ticket.settled:
            self.settle([ticket])
        self._touch()
        return future

    def confirm(
        self,
        from_sqn: SequenceNumber,
        to_sqn: SequenceNumber,
        located: Mapping[str, SegmentHandle] | None = None,
    ) -> None:
        """A completed checkpoint references ``[from_sqn, to_sqn)``: its objects are the coordinator's from now on.

        Args:
            from_sqn: As given to the persist.
            to_sqn: End of the last segment that the persist returned.
            located: Where the manifest holds the inlined seals, by ``InlineSegment.id``.

        Raises:
            Invalid: Something in the range is not durable and no place is given for it; nothing was changed.
        """
        self.settle(self.ledger.confirm(SequenceNumberRange(from_sqn, to_sqn), located or {}))
        self._touch()

    def reset(self, from_sqn: SequenceNumber, to_sqn: SequenceNumber) -> None:
        """The checkpoint with ``[from_sqn, to_sqn)`` was certainly aborted: the changes are only ours again.

        Durable ones are reused by the next persist, inlined ones wait in the buffer. Not to be called while the
        outcome is unknown.
        """
        self.ledger.reset(SequenceNumberRange(from_sqn, to_sqn))
        self._touch()

    def truncate(self, to_sqn: SequenceNumber) -> None:
        """Forget everything below ``to_sqn``: it is materialized, and no retained checkpoint needs it.

        What an open persist covers, or a checkpoint that is not confirmed or reset yet, goes when that ends.

        Raises:
            Invalid: ``to_sqn`` is beyond what was appended.
        """
        self.ledger.truncate(to_sqn)
        self._touch()

    def truncate_and_close(self, from_sqn: SequenceNumber) -> None:
        """Close the log; no completed checkpoint references anything from ``from_sqn`` on. Idempotent.

        Every object is deleted that no log needs and no checkpoint may reference: neither confirmed, nor returned by a
        persist that was not :meth:`reset`. The caller's word alone deletes nothing: while the outcome of a checkpoint
        is unknown its objects stay, on both sides of ``from_sqn``, and are the coordinator's and its cleaner's.

        Raises:
            Invalid: ``from_sqn`` is beyond what was appended. Nothing was closed.
        """
        if self._closed:
            return
        end = self.ledger.next_sqn + (not self._open.is_empty)
        if from_sqn > end:
            raise Invalid(f"log {self.log_id}: cannot truncate from {from_sqn}, next is {end}")
        self._closed = True
        self._host.budget.give_back(self._accounted)
        self._accounted = 0
        self._open = ChangeSet()
        self.settle(self.ledger.close(self._closed_error()))
        self._host.closed(self)

    def close(self) -> None:
        """Close the log and keep what any checkpoint may reference. Idempotent."""
        self.truncate_and_close(self.ledger.next_sqn)

    # What follows is for the storage.

    @property
    def held_bytes(self) -> int:
        """Bytes that are in no seal: buffered change sets and the open one."""
        return self._open.nbytes + self.ledger.buffered_bytes

    def account(self) -> None:
        """Bring the budget up to what the open change set holds. Appends leave this to the next look."""
        self._touched = False
        nbytes = self._open.nbytes
        self._host.budget.take(nbytes - self._accounted)
        self._accounted = nbytes

    def roll_open(self) -> None:
        """Close the open change set for an upload that nobody asked for."""
        if not self._closed:
            self._roll()

    def settle(self, tickets: list[PersistTicket]) -> None:
        """Give settled persists to those who await them."""
        for ticket in tickets:
            future = self._futures.pop(ticket, None)
            if future is None or future.done():
                continue
            if ticket.result is not None:
                future.set_result(ticket.result)
            elif ticket.error is not None:
                future.set_exception(_own_copy(ticket.error))

    def _touch(self) -> None:
        self._touched = True
        self._host.touched(self)

    def _roll(self) -> None:
        if self._open.is_empty:
            return
        self.account()
        self.ledger.add(self._open, self._accounted)
        self._open = ChangeSet()
        self._accounted = 0
        self._touch()

    def _future_done(self, ticket: PersistTicket, future: asyncio.Future[tuple[LogSegment, ...]]) -> None:
        self._futures.pop(ticket, None)
        if future.cancelled():
            self.ledger.abandon(ticket, asyncio.CancelledError())
            self._touch()
        else:
            future.exception()  # a persist whose caller is gone must not log "never retrieved"

    def _closed_error(self) -> Closed:
        return Closed(f"changelog writer {self.log_id} is closed: the changes were not taken, fail the task")


def _own_copy(error: BaseException) -> BaseException:
    """Many persists fail with one upload: each raises its own instance, so that tracebacks do not grow together."""
    if not isinstance(error, DstlError):
        return error
    own = copy.copy(error)
    own.__cause__ = error
    return own
