"""The input of one task beside its rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pyarrow as pa

from dstl.rpc.state_client import StateClient
from dstl.state.broadcast_state import BroadcastRows, ReadWhole


@dataclass(frozen=True, slots=True)
class TaskInput:
    """The input of one run of one task beside its rows.

    Attributes:
        source: Prior state: the parent checkpoint.
        send: Takes each part of the change set, in order, as a batch of ``CHANGE_SCHEMA``. When the run's last output
            has been taken, everything has been sent.
        sequence: Grows from batch to batch over the job's whole life, restarts and savepoints included, and is the
            same when a batch runs again: one above the parent checkpoint's number.
        key_groups: The partition's key groups, for expired timers.
        processing_time_ms: The batch's time, milliseconds since 1970; the same when the batch runs again.
        watermark_ms: Event-time watermark, 0 before there is one: timers up to it are due.
        late_watermark_ms: Rows up to it are late: the watermark of the batch before, as in Spark. None: the same.
        broadcast: Rows of the operator's broadcast streams, of those that have any.
        send_broadcast: Takes what was written to broadcast states, as ``send`` takes the rest; None for nothing.
        read_broadcast: Reads broadcast states that this process may have read for another task; None: each task reads.
        send_expiring: Takes those parts whose puts are of entries with a time (see ``StateClient.fetch_due``) that had
            none before, or another; None: ``send`` takes them.
        part_bytes: The change set is sent in parts of about this size. Smaller: less memory in the worker, and uploads
            that start earlier; larger: fewer messages.
        call_rows: Rows that are handled at a time, about, in whole keys, where they are handled by columns. More: fewer
            calls and round trips; fewer: less memory beside the rows.
    """

    source: StateClient
    send: Callable[[pa.RecordBatch], None]
    sequence: int
    key_groups: Sequence[int] = ()
    processing_time_ms: int = -1
    watermark_ms: int = 0
    late_watermark_ms: int | None = None
    broadcast: Sequence[BroadcastRows] = ()
    send_broadcast: Callable[[pa.RecordBatch], None] | None = None
    read_broadcast: ReadWhole | None = None
    send_expiring: Callable[[pa.RecordBatch], None] | None = None
    part_bytes: int = 8 << 20
    call_rows: int = 1 << 20

    @property
    def late_until_ms(self) -> int:
        """Rows at or before it are late, milliseconds since 1970."""
        return self.watermark_ms if self.late_watermark_ms is None else self.late_watermark_ms
