"""The other half of a checkpoint that is Spark's own commit: its checkpoint directory, where that lies in the same log.

A run whose ``checkpointLocation`` is the backend's is *committed by Spark*: ``commits/N`` is what triggers the
checkpoint of batch N, and the record that holds both is the only truth. Acknowledgements say which attempts have ended,
and decide nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from handles.file_record import FileRecord

__all__ = ["CommitFiles", "FilesStep", "SparkDirectory"]


@dataclass(frozen=True, slots=True)
class FilesStep:
    """Spark's part of a record.

    Attributes:
        record: The step of its directory's index.
        inlined: Segments to be written inside the record, behind the checkpoint's.
        whole: Number of the newest record with the whole index, this one perhaps: readers begin there at the latest.
    """

    record: FileRecord
    inlined: Sequence[bytes]
    whole: int


class CommitFiles(Protocol):
    """The commit of a batch that Spark is writing, and all of its files since the last one."""

    def step(self, sequence: int, in_front: Sequence[int]) -> FilesStep:
        """Return Spark's part of the record of this number.

        Args:
            sequence: The number.
            in_front: Sizes of the segments of the checkpoint's own that the record holds.

        Raises:
            DstlError: Something that the commit needs is missing.
        """
        ...


class SparkDirectory(Protocol):
    """Spark's checkpoint directory in the manifest log of a query's checkpoints. One event loop."""

    def serves(self, run_id: str) -> bool:
        """Return True where this run of the query keeps its checkpoint directory here."""
        ...

    async def lead(self, query_id: str) -> None:
        """Take the log over for a query, unless it is this driver's already, and read what it says.

        Raises:
            Invalid: The location is another query's.
            Fenced: Somebody newer has taken over.
            DstlError: As :meth:`ManifestLog.fence` and :meth:`ManifestLog.scan`.
        """
        ...

    def newest_commit(self) -> int:
        """Return the newest batch that Spark has committed, -1 where there is none."""
        ...

    async def batch_time_ms(self, batch_id: int) -> int | None:
        """Return a batch's processing time by Spark's record of its offsets; None where that does not tell."""
        ...
