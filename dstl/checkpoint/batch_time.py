"""The processing time of a batch, by a driver's clock that may be wrong."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from handles.checkpoint import CompletedCheckpoint

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class BatchTime:
    """A batch's processing time.

    Attributes:
        ms: Unix milliseconds.
        held_since_ms: It is the time of an earlier batch, for the clock was behind it: what the clock said when that
            began. None where the clock is followed.
    """

    ms: int
    held_since_ms: int | None = None

    @classmethod
    def of(cls, checkpoint: CompletedCheckpoint | None) -> BatchTime | None:
        """Return the time of a checkpoint's batch; None where it is not known."""
        if checkpoint is None or checkpoint.batch_time_ms is None:
            return None
        return cls(checkpoint.batch_time_ms, checkpoint.held_since_ms)

    @classmethod
    def after(cls, before: BatchTime | None, now_ms: int, hold_ms: int) -> BatchTime:
        """Return the time of the next batch.

        A clock that is behind may be wrong, or the one before it was: both look alike here. So time stands still, for
        ``hold_ms`` of the clock at most; then it goes on with the clock, back if need be.

        Args:
            before: The batch before; None for the first.
            now_ms: What the clock says.
            hold_ms: How long time may stand still; 0: the clock is always followed.
        """
        if before is None or now_ms >= before.ms:
            return cls(now_ms)
        since = before.held_since_ms
        if since is None or since > now_ms:
            since = now_ms
        return cls(now_ms) if now_ms - since >= hold_ms else cls(before.ms, since)

    def warning(self, before: BatchTime | None, now_ms: int, hold_ms: int) -> str | None:
        """Return what to warn of; None where the clock is right, or the warning was given before.

        The arguments are those of :meth:`after`, which returned this.
        """
        if before is None or now_ms >= before.ms or before.held_since_ms is not None:
            return None
        clock = f"the driver's clock says {_text(now_ms)}, and the batch before ran at {_text(before.ms)}"
        if self.held_since_ms is None:
            return f"{clock}: processing time goes back with the clock, for checkpoints.clock_hold_s is 0"
        return (
            f"{clock}: processing time stands still until the clock says {_text(now_ms + hold_ms)}, and then goes on "
            "with the clock. If the clock is wrong, correct it before then; if it is right, restart with "
            "checkpoints.clock_hold_s=0, and it is followed at once"
        )


def _text(ms: int) -> str:
    return (_EPOCH + timedelta(milliseconds=ms)).isoformat(sep=" ", timespec="seconds")
