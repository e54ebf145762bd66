"""Spark's checkpoint directory in the manifest log of the query's own checkpoints: one record a batch holds both.

``offsets/N`` is a record of files. ``commits/N`` is what triggers the checkpoint of batch N, and one record holds them:
Spark's commit, its files since the last one, and the checkpoint. So there is no second truth that could disagree, and
what makes tasks run twice or not at all is Spark's to know.
"""

from __future__ import annotations

from collections.abc import Sequence

from dstl.checkpoint.committed_runs import CommittedRuns
from dstl.errors import ObjectNotFound
from dstl.files.directory import Listed
from dstl.files.file_log import FileLog
from dstl.files.file_run import FileRun
from dstl.files.leader import LeaderDirectory
from dstl.files.namespace import METADATA
from dstl.files.options import FileOptions
from dstl.files.participants import Participants
from dstl.files.query_records import WHOLE_EVERY, QueryRecords, json_field, query_id_of
from dstl.rpc.codec import Payload
from dstl.runtime import Runtime
from handles.file_record import barrier_batch


class QueryDirectory(LeaderDirectory):
    """The checkpoint directory of the query that a ``StateBackend`` serves. One event loop.

    Args:
        root: Its URI.
        log: What the driver's JVM puts. Its store stays the caller's; that of the plain files of an earlier directory
            is closed with this.
        checkpoints: The query's; the log is theirs. None where no query runs, and only the index is changed.
        runtime: Clock, jitter and ids.
        options: When a batch waits for its record.

    Attributes:
        runs: Runs of the query that have looked at it while Spark ran them, the latest last.
        query_id: The query's, by Spark's ``metadata``; empty until that was written or read.
    """

    def __init__(
        self,
        root: str,
        log: FileLog,
        checkpoints: CommittedRuns | None,
        runtime: Runtime,
        options: FileOptions = FileOptions(),
    ) -> None:
        self.runs: dict[str, None] = {}
        self.query_id = ""
        self._planned: tuple[str, int, int | None] = ("", -1, None)
        self._checkpoints = checkpoints
        records = QueryRecords(checkpoints, self, Participants(root, log, FileRun(WHOLE_EVERY)), runtime)
        super().__init__(root, log, records, runtime.clock, options)

    async def put(self, path: str, run: str, attempt: int, content: Sequence[Payload]) -> None:
        """Take a file; ``commits/N`` is durable together with the checkpoint of batch N when this returns.

        Raises:
            Invalid: The location is another query's, or an operator was not run in the batch.
            CheckpointDeclined: An operator was run in part, or the checkpoint failed.
            DstlError: As :meth:`Directory.put`.
        """
        await self._meet(run)
        if path == METADATA:
            self.query_id = query_id_of(b"".join(content))
            await self.lead(self.query_id)
        await super().put(path, run, attempt, content)

    async def lacks_tasks(self, path: str, run: str) -> bool:
        """Return whether tasks of a batch have to run before its commit, which is this file, can be taken."""
        await self._meet(run)
        batch = barrier_batch(path, "commits")
        return batch is not None and self._checkpoints is not None and self._checkpoints.lacks_tasks(run, batch)

    async def find(self, path: str, run: str) -> Listed | None:
        """Return a file or a directory."""
        found = await super().find(path, run)
        if found is not None and barrier_batch(path, "offsets") is not None:
            return path, len(await self.read(path, run)), found[2]
        return found

    async def read(self, path: str, run: str, offset: int = 0, length: int | None = None) -> bytes:
        """Return a file's bytes, or a part of them; a record of offsets is read by the sources that the run has."""
        if run and self._checkpoints is not None and barrier_batch(path, "offsets") is not None:
            content = await self._checkpoints.fitted_offsets(run, await super().read(path, run))
            return content[offset : None if length is None else offset + length]
        content = await super().read(path, run, offset, length)
        if path == METADATA and offset == 0:
            self.query_id = query_id_of(content)
        return content

    async def listing(self, path: str, run: str) -> list[Listed]:
        """Return what lies in a directory."""
        await self._meet(run)
        return await super().listing(path, run)

    async def _meet(self, run: str) -> None:
        # What comes late of a run that is over, as a purge does, must not make it the latest.
        if run and run not in self.runs and self._checkpoints is not None and await self._checkpoints.is_running(run):
            self.runs[run] = None

    async def lead(self, query_id: str) -> None:
        """Take the log over for a query, unless it is this driver's already; see :class:`SparkDirectory`."""
        await self._records.lead(query_id)

    async def settle(self) -> None:
        """Make a commit durable that waits for the next offsets; where that fails its run is over, and is told."""
        await self.barriers.settle("")

    def newest_commit(self) -> int:
        """Return the newest batch that Spark has committed, -1 where there is none."""
        return self.run.newest("commits")

    async def batch_time_ms(self, batch_id: int, run_id: str) -> int | None:
        """Return a batch's processing time by Spark's record of its offsets; see :class:`SparkDirectory`."""
        await self.barriers.begun(run_id)
        self.run.admit(run_id)
        if (run_id, batch_id) != self._planned[:2]:
            try:
                content = await super().read(f"offsets/{batch_id}", run_id)
            except ObjectNotFound:
                return None
            found = json_field(content, "batchTimestampMs")
            # Each task of the batch asks, and a run writes the offsets of a batch once.
            self._planned = run_id, batch_id, found if isinstance(found, int) else None
        return self._planned[2]
