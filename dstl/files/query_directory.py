"""Spark's checkpoint directory in the manifest log of the query's own checkpoints: one record a batch holds both.

``offsets/N`` is a record of files. ``commits/N`` is what triggers the checkpoint of batch N, and one record holds them:
Spark's commit, its files since the last one, and the checkpoint. So there is no second truth that could disagree, and
what makes tasks run twice or not at all is Spark's to know.
"""

from __future__ import annotations

from collections.abc import Sequence

from dstl.errors import ObjectNotFound
from dstl.files.coordinated import CoordinatedDirectory
from dstl.files.directory import Listed
from dstl.files.file_log import FileLog
from dstl.files.file_run import FileRun
from dstl.files.namespace import barrier_batch
from dstl.files.participants import Participants
from dstl.files.query_records import METADATA, WHOLE_EVERY, Checkpoints, QueryRecords, json_field, query_id_of
from dstl.files.reader import FileReader
from dstl.rpc.codec import Payload
from dstl.runtime import Runtime
from dstl.store.base import ObjectStore

__all__ = ["QueryDirectory"]


class QueryDirectory(CoordinatedDirectory):
    """The checkpoint directory of the query that a ``StateBackend`` serves. One event loop.

    Args:
        root: Its URI.
        store: The backend's location; stays the caller's.
        plain: Where plain files of an earlier directory are taken over from; closed with this.
        log: What the driver's JVM puts.
        checkpoints: The query's; the log is theirs.
        runtime: Clock, jitter and ids.
    """

    def __init__(
        self,
        root: str,
        store: ObjectStore,
        plain: ObjectStore,
        log: FileLog,
        checkpoints: Checkpoints,
        runtime: Runtime,
    ) -> None:
        self._seen_runs: set[str] = set()
        run = FileRun(WHOLE_EVERY)
        participants, reader = Participants(root, log, {}, run), FileReader(store, plain, runtime)
        records = QueryRecords(root, store, plain, checkpoints, self, run, participants, reader, runtime)
        super().__init__(root, log, records, runtime.clock)

    async def put(self, path: str, run: str, attempt: int, content: Sequence[Payload]) -> None:
        """Take a file; ``commits/N`` is durable together with the checkpoint of batch N when this returns.

        Raises:
            Invalid: The location is another query's, or an operator was not run in the batch.
            CheckpointDeclined: An operator was run in part, or the checkpoint failed.
            DstlError: As :meth:`Directory.put`.
        """
        self._seen_runs.add(run)
        if path == METADATA:
            await self.lead(query_id_of(b"".join(content)))
        await super().put(path, run, attempt, content)

    async def listing(self, path: str, run: str) -> list[Listed]:
        """Return what lies in a directory."""
        self._seen_runs.add(run)
        return await super().listing(path, run)

    def serves(self, run_id: str) -> bool:
        """Return True where this run of the query keeps its checkpoint directory here."""
        return bool(run_id) and run_id in self._seen_runs

    async def lead(self, query_id: str) -> None:
        """Take the log over for a query, unless it is this driver's already; see :class:`SparkDirectory`."""
        await self._records.lead(query_id)

    def newest_commit(self) -> int:
        """Return the newest batch that Spark has committed, -1 where there is none."""
        found = (barrier_batch(f"commits/{name}") for name in self.run.index.tree.names("commits"))
        return max((batch for batch in found if batch is not None), default=-1)

    async def batch_time_ms(self, batch_id: int) -> int | None:
        """Return a batch's processing time by Spark's record of its offsets; None where that does not tell."""
        try:
            content = await self.read(f"offsets/{batch_id}", "")
        except ObjectNotFound:
            return None
        found = json_field(content, "batchTimestampMs")
        return found if isinstance(found, int) else None
