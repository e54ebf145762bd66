"""The changelog writer of one operator and partition (FLIP-158, ``StateChangelogWriter``)."""

from __future__ import annotations

from typing import Protocol

import pyarrow as pa

from dstl.changelog.change_set import ChangeSet
from dstl.changelog.ledger import LogLedger
from dstl.changelog.log_segment import SegmentReferences
from dstl.changelog.throttle import ByteBudget
from dstl.errors import Closed, Invalid
from handles.segment_handle import SequenceNumber


class WriterHost(Protocol):
    """The part of a storage that its writers and seals call."""

    budget: ByteBudget
    references: SegmentReferences

    def look_soon(self) -> None:
        """Something has changed: see soon what follows from it."""

    def touched(self, writer: StateChangelogWriter) -> None:
        """The writer holds more or less than before; look at it soon."""

    def encode_ahead(self, log_id: str, sqn: SequenceNumber, changes: ChangeSet) -> None:
        """Encode a closed change set before a persist asks for it, where that is worth it."""

    def closed(self, writer: StateChangelogWriter) -> None:
        """The writer was closed."""


class StateChangelogWriter:
    """One log: append changes and truncate them. Made by ``StateChangelogStorage.create_writer``, which persists it.

    Invariants:
        1. Appends never move the sequence number; ``next_sequence_number`` and a persist move it by one, and only when
           something was appended since. A pre-emptive upload closes change sets too, between appends.
        2. A change set's bytes are kept until a stored object or a completed checkpoint holds them.

    One event loop only; no call waits.

    Args:
        log_id: Unique per incarnation: of operator, key groups and owner.
        host: The storage.

    Attributes:
        ledger: Where each change set is; for the storage.
    """

    def __init__(self, log_id: str, host: WriterHost) -> None:
        self.log_id = log_id
        self.ledger: LogLedger[ChangeSet] = LogLedger(log_id, host.references, host.budget)
        self._host = host
        self._open = ChangeSet()
        self._closed = False

    @property
    def held_bytes(self) -> int:
        """Bytes that are in no seal: buffered change sets and the open one."""
        return self._open.nbytes + self.ledger.buffered_bytes

    def append_batch(self, batch: pa.RecordBatch) -> None:
        """Append changes as columns of ``CHANGE_SCHEMA``; the batch must not change afterwards.

        Raises:
            Closed: The writer was closed; nothing was taken.
            Invalid: Not changes. Nothing was appended.
        """
        self.check_open()
        before = self._open.nbytes
        self._open.append_batch(batch)
        self._grown(before)

    def append_metadata(self, blob: bytes) -> None:
        """Append non-keyed metadata (state schemas), which every reader of the log gets in its place.

        Raises:
            Closed: The writer was closed.
        """
        self.check_open()
        before = self._open.nbytes
        self._open.append_metadata(blob)
        self._grown(before)

    def next_sequence_number(self) -> SequenceNumber:
        """Close the open change set if it is not empty, and return the number that the next one will have.

        The FLIP's ``lastAppendedSqn``: everything appended so far is below the returned number.

        Raises:
            Closed: The writer was closed.
        """
        self.check_open()
        if not self._open.is_empty:
            self.ledger.add(self._open, self._open.nbytes)
            self._open = ChangeSet()
        return self.ledger.next_sqn

    def encode_ahead(self) -> None:
        """Close the open change set if it is not empty, and encode it before it is needed.

        For a caller that will append no more before the next persist. What it appends all the same is encoded with it
        again then.

        Raises:
            Closed: The writer was closed.
        """
        sqn, changes = self.ledger.next_sqn, self._open
        if self.next_sequence_number() > sqn:
            self._host.encode_ahead(self.log_id, sqn, changes)

    def truncate(self, to_sqn: SequenceNumber) -> None:
        """Forget everything below ``to_sqn``: it is materialized, and no retained checkpoint needs it.

        What a checkpoint covers that is not confirmed or reset yet goes when that ends.

        Raises:
            Invalid: ``to_sqn`` is beyond what was appended.
        """
        self.ledger.truncate(to_sqn)
        self._host.touched(self)

    def truncate_and_close(self, from_sqn: SequenceNumber) -> None:
        """Close the log; no completed checkpoint references anything from ``from_sqn`` on. Idempotent.

        Every object is deleted that no log needs and no checkpoint may reference: neither confirmed, nor returned by a
        persist that was not reset. The caller's word alone deletes nothing: while the outcome of a checkpoint is
        unknown its objects stay, on both sides of ``from_sqn``, and are the coordinator's and its cleaner's.

        Raises:
            Invalid: ``from_sqn`` is beyond what was appended. Nothing was closed.
        """
        if self._closed:
            return
        end = self.ledger.next_sqn + (not self._open.is_empty)
        if from_sqn > end:
            raise Invalid(f"log {self.log_id}: cannot truncate from {from_sqn}, next is {end}")
        self._closed = True
        self._host.budget.give_back(self._open.nbytes)
        self._open = ChangeSet()
        self.ledger.close()
        self._host.closed(self)

    def close(self) -> None:
        """Close the log and keep what any checkpoint may reference. Idempotent."""
        self.truncate_and_close(self.ledger.next_sqn)

    def check_open(self) -> None:
        """Refuse to go on with a log that is over.

        Raises:
            Closed: The writer was closed.
        """
        if self._closed:
            raise Closed(f"changelog writer {self.log_id} is closed: the changes were not taken, fail the task")

    def _grown(self, before: int) -> None:
        self._host.budget.take(self._open.nbytes - before)
        self._host.touched(self)
