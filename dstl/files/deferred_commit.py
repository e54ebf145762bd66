"""A commit that Spark has been told of, and that rides in the next record: ``spark.dstl.commit=with-next``."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from dstl.files.riders import Rider
from dstl.rpc.fleet_messages import Persisted

LINGER_S = 0.05
"""So long a commit waits for the offsets of the next batch before it has a record of its own."""


@dataclass(slots=True, eq=False)
class DeferredCommit:
    """A commit on its way into a record.

    Attributes:
        path: The commit file.
        run: The run that has made it.
        batch: Its batch.
        content: Its bytes.
        rider: The commit file in the log.
        parts: What all who have a part in it have of it; uploaded while the query goes on.
        late: Gives it a record of its own where no other one comes.
    """

    path: str
    run: str
    batch: int
    content: bytes
    rider: Rider
    parts: asyncio.Task[list[Persisted]]
    late: asyncio.Task[None] | None = None

    def end(self) -> None:
        """It is in a record, or lost."""
        self.parts.cancel()
        if self.late is not None and self.late is not asyncio.current_task():
            self.late.cancel()
