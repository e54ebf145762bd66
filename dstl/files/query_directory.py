"""Spark's checkpoint directory in the manifest log of the query's own checkpoints: one record a batch holds both.

``offsets/N`` is a record of files. ``commits/N`` is what triggers the checkpoint of batch N, and one record holds them:
Spark's commit, its files since the last one, and the checkpoint. So there is no second truth that could disagree, and
what makes tasks run twice or not at all is Spark's to know.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any, Protocol

from dstl.checkpoint.manifest.log import ManifestLog
from dstl.checkpoint.manifest.scan import ManifestScan
from dstl.checkpoint.spark_commit import CommitFiles, FilesStep
from dstl.errors import DstlError, Fenced, Invalid, ObjectNotFound
from dstl.files.coordinated import CoordinatedDirectory
from dstl.files.directory import Listed
from dstl.files.file_log import FileLog
from dstl.files.file_run import Step
from dstl.files.index import file_steps
from dstl.files.namespace import barrier_batch
from dstl.rpc.codec import Payload
from dstl.rpc.file_messages import PersistedFiles
from dstl.runtime import Runtime
from dstl.store.base import ObjectStore

__all__ = ["Checkpoints", "QueryDirectory"]

_log = logging.getLogger(__name__)

_WHOLE_EVERY = 20
"""Such an index has no state files, so a whole one is small, and a start reads this many records at most."""
_METADATA = "metadata"


class Checkpoints(Protocol):
    """The query's checkpoints: :class:`~dstl.checkpoint.committed_runs.CommittedRuns`."""

    @property
    def operators(self) -> Sequence[str]:
        """Names of the operators."""
        ...

    def attach(self, directory: QueryDirectory, needs: Callable[[str], bool]) -> ManifestLog:
        """Let the directory lie in the log; returns the log."""
        ...

    def commit_batch(self, query_id: str, run_id: str, batch_id: int, files: CommitFiles) -> Awaitable[None]:
        """Make the checkpoint of a batch and Spark's commit of it, in one record."""
        ...

    def delete(self, names: Iterable[str]) -> None:
        """Delete objects that no file needs, except what checkpoints need."""
        ...


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
        super().__init__(root, store, plain, log, {}, runtime, whole_every=_WHOLE_EVERY)
        self._checkpoints = checkpoints
        self._manifests = checkpoints.attach(self, self._needs)
        self._seen_runs: set[str] = set()
        self._owner = ""
        self._query_id = ""
        self._whole = 0
        self._unsettled: _Commit | None = None

    async def put(self, path: str, run: str, attempt: int, content: Sequence[Payload]) -> None:
        """Take a file; ``commits/N`` is durable together with the checkpoint of batch N when this returns.

        Raises:
            Invalid: The location is another query's, or an operator was not run in the batch.
            CheckpointDeclined: An operator was run in part, or the checkpoint failed.
            DstlError: As :meth:`Directory.put`.
        """
        self._seen_runs.add(run)
        if path == _METADATA:
            await self.lead(_query_id(b"".join(content)))
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
        if self._leads:
            self._check_owner(query_id)
            return
        async with self._opening:
            if self._leads:
                return
            if self._read_at is None:
                await self._read_log()
            self._check_owner(query_id)
            await self._manifests.fence(query_id)
            await self._read_log()
            self._check_owner(query_id)
            self._query_id, self._leads = query_id, True

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
        found = _field(content, "batchTimestampMs")
        return found if isinstance(found, int) else None

    async def close(self) -> None:
        """Flush, and end; the backend's store stays open. Idempotent."""
        try:
            await self.flush()
        except DstlError as error:
            _log.error("%s: what was written outside of a query is lost: %s", self.root, error)
        await self._log.close()
        await self._reader.close()
        await self._plain.close()

    async def _lead(self) -> None:
        if not self._leads:
            await self.lead(_query_id(await self.read(_METADATA, "")))

    async def _commit_batch(self, path: str, run: str, content: bytes) -> None:
        batch = barrier_batch(path, "commits")
        assert batch is not None
        self._participants.begin(path, run)
        commit = _Commit(self, [(path, content)], await self._participants.persist(batch + 1))
        try:
            if self._checkpoints.operators:
                await self._checkpoints.commit_batch(self._query_id, run, batch, commit)
            else:
                await self._write_files(commit)
        except BaseException as error:
            self._give_up(commit, error)
            raise
        self._take(commit)

    async def _write(self, barriers: Sequence[tuple[str, bytes]], parts: Sequence[PersistedFiles]) -> None:
        commit = _Commit(self, barriers, parts)
        try:
            await self._write_files(commit)
        except BaseException as error:
            self._give_up(commit, error)
            raise
        self._take(commit)

    async def _write_files(self, commit: _Commit) -> None:
        step = commit.step(self._manifests.next_sequence, ())
        await self._manifests.commit_files(self._query_id, step.record, step.inlined)

    def _give_up(self, commit: _Commit, error: BaseException) -> None:
        """A record was not written, or nobody knows: then the next fence finds out."""
        if self._manifests.is_unknown:
            self._unsettled, self._read_at = commit, None
        elif isinstance(error, Fenced):
            # It may lie below the fence.
            self._log.abandon()
        else:
            self._log.reset()

    def _resolve(self, scan: ManifestScan) -> None:
        """Complete or reset what an unknown record was to hold: a fence has decided it."""
        commit, self._unsettled = self._unsettled, None
        if commit is not None and commit.made is not None:
            record = scan.records.get(commit.sequence)
            if record is None:
                # Others have cleaned it away since, and may have taken over what it named.
                self._log.abandon()
            elif record.files == commit.made.record:
                self._reader.keep(self._log.complete(commit.made.located))
            else:
                self._log.reset()

    def _take(self, commit: _Commit) -> None:
        """A record is durable."""
        made = commit.made
        assert made is not None
        self.run.index.apply(made.record, commit.sequence)
        self._tail = commit.sequence
        self._reader.keep(self._log.complete(made.located))
        if made.record.is_whole:
            self._whole = commit.sequence
            self._checkpoints.delete(self.run.index.take_free(self._whole))

    async def _read_log(self) -> None:
        """Take over what the records say: those of the query that the location belongs to."""
        began = self._runtime.clock.now()
        scan = await self._manifests.scan()
        self._owner = scan.query_id
        self.run.index = type(self.run.index)()
        for _, error in sorted(scan.damaged.items()):
            raise error
        # Without a whole one the query has moved out: its checkpoints have gone on, and dropped the index.
        is_here = any(record.files is not None and record.files.is_whole for record in scan.records.values())
        steps = file_steps(scan, self._store.location, scan.query_id) if is_here else []
        for sequence, files in steps:
            self.run.index.apply(files, sequence)
        self._whole = steps[0][0] if steps else 0
        if not steps:
            await self._adopt()
        self.run.index.take_free(0)
        self._tail, self._read_at = scan.tail, began
        if not self._manifests.is_unknown:
            self._resolve(scan)

    def _check_owner(self, query_id: str) -> None:
        if self._owner not in ("", query_id):
            raise Invalid(
                f"{self._store.location} belongs to query {self._owner}; this is query {query_id}: {self.root} has no "
                "checkpoint directory of that query. Give this query a location of its own, or copy the checkpoint "
                f"directory that it had into {self._plain.location} first, which is taken over from there"
            )

    def _needs(self, name: str) -> bool:
        return self.run.index.needs(name, self._whole)


class _Commit:
    """Barriers, ready to become a record, or a part of one."""

    def __init__(
        self, directory: QueryDirectory, barriers: Sequence[tuple[str, bytes]], parts: Sequence[PersistedFiles]
    ) -> None:
        self._directory = directory
        self._barriers, self._parts = barriers, parts
        self.made: Step | None = None
        self.sequence = 0

    def step(self, sequence: int, in_front: Sequence[int]) -> FilesStep:
        directory = self._directory
        *also, (barrier, content) = self._barriers
        made = directory.run.step(barrier, content, self._parts, sequence, directory._whole, also, in_front)
        self.made, self.sequence = made, sequence
        return FilesStep(made.record, made.inlined, sequence if made.record.is_whole else directory._whole)


def _query_id(metadata: bytes) -> str:
    """Return the query's id by Spark's ``metadata`` file."""
    found = _field(metadata, "id")
    if not isinstance(found, str) or not found:
        raise Invalid("Spark's metadata file names no query: it is of another make than this DSTL knows")
    return found


def _field(content: bytes, name: str) -> Any:
    """Return a field of the first line of a file of Spark's that is a JSON object and has it; None without one."""
    for line in content.split(b"\n"):
        try:
            plain = json.loads(line)
        except ValueError:
            continue
        if isinstance(plain, dict) and name in plain:
            return plain[name]
    return None
