"""The records of a checkpoint directory in the manifest log of the query's own checkpoints."""

from __future__ import annotations

import json
from collections.abc import Coroutine
from dataclasses import replace
from functools import partial
from typing import Any

from dstl.checkpoint.committed_runs import CommittedRuns
from dstl.checkpoint.manifest.log import ManifestLog
from dstl.checkpoint.manifest.reader import ManifestScan
from dstl.checkpoint.spark_commit import CheckpointInTheMaking, SparkDirectory
from dstl.errors import Invalid, ObjectNotFound
from dstl.files.index import FileIndex, file_steps
from dstl.files.namespace import METADATA
from dstl.files.participants import Participants
from dstl.files.records import Barrier, NextRecord, Records
from dstl.rpc.fleet_messages import Persisted
from dstl.runtime import Runtime
from handles.file_record import FileRecord, barrier_batch

WHOLE_EVERY = 20
"""Such an index has no state files, so a whole one is small, and a start reads this many records at most."""


class QueryRecords(Records):
    """Those of the directory of the query that a ``StateBackend`` serves: one record holds a commit and its checkpoint.

    Args:
        checkpoints: The query's; the log is theirs. None where no query runs, and only the index is changed.
        directory: Whom the checkpoints ask about Spark's commits.
        participants: This process alone.
        runtime: Clock.
    """

    def __init__(
        self,
        checkpoints: CommittedRuns | None,
        directory: SparkDirectory,
        participants: Participants,
        runtime: Runtime,
    ) -> None:
        if checkpoints is None:
            manifests = ManifestLog(participants.log.reader.store, runtime)
        else:
            manifests = checkpoints.attach(directory, self._needs)
        super().__init__(manifests, participants, runtime)
        self._checkpoints = checkpoints
        self._owner = ""
        self._query_id = ""
        self._whole = 0
        self._unsettled: NextRecord | None = None
        self._making: CheckpointInTheMaking | None = None

    async def begin(self, batch: int, run: str, barrier: Barrier) -> Coroutine[Any, Any, list[Persisted]]:
        """Begin the checkpoint of a batch and Spark's commit of it, which are one record.

        Raises:
            Invalid: An operator was not run in the batch.
            CheckpointDeclined: It was run in part.
        """
        if self._checkpoints is None or not self.is_stateful:
            return await super().begin(batch, run, barrier)
        making = CheckpointInTheMaking(partial(self._checkpoints.commit_batch, self._query_id, run, batch))
        await making.begin()
        self._making = making
        parts = await super().begin(batch, run, barrier)

        async def persist() -> list[Persisted]:
            persisted = await parts
            await making.persisted()
            return persisted

        return persist()

    def drop(self) -> None:
        """Give up a checkpoint that was begun and has come into no record. Idempotent."""
        making, self._making = self._making, None
        if making is not None:
            making.drop()

    @property
    def is_stateful(self) -> bool:
        """True where the query has operators of this backend: they have a part in every commit."""
        return self._checkpoints is not None and bool(self._checkpoints.operators)

    def _boundary(self) -> int:
        return self._whole

    async def _fence(self, query_id: str) -> None:
        query_id = query_id or self._query_id or await self._query_id_here()
        self._check_owner(query_id)
        async with self._manifests.turn:
            await self._manifests.fence(query_id)
        self._query_id = query_id

    async def _query_id_here(self) -> str:
        entry = self.run.index.find(METADATA)
        if entry is None:
            raise ObjectNotFound(f"{self.participants.root}/{METADATA} is not there")
        return query_id_of(await self.reader.read(entry))

    async def _send(self, record: NextRecord) -> None:
        making, self._making = self._making, None
        if making is not None:
            await making.write(record.step)
            return
        async with self._manifests.turn:
            step = record.step(self._manifests.next_sequence)
            await self._manifests.commit_files(self._query_id, step.record, step.inlined)

    async def _give_up(self, record: NextRecord, error: BaseException) -> None:
        if self.is_unknown:
            # The next fence finds out.
            self._unsettled, self._read_at = record, None
        else:
            await super()._give_up(record, error)

    async def _settle(self, scan: ManifestScan) -> None:
        """Complete or reset what an unknown record was to hold: a fence has decided it."""
        unsettled, self._unsettled = self._unsettled, None
        if unsettled is None or unsettled.made is None:
            return
        record = scan.records.get(unsettled.sequence)
        if record is None:
            # Others have cleaned it away since, and may have taken over what it named.
            self.participants.abandon()
        elif record.files == unsettled.made.record:
            await self.participants.complete(unsettled.made.located, unsettled.barrier)
        else:
            await self.participants.reset()

    def _let_go(self, whole: int) -> None:
        self._whole = whole
        if self._checkpoints is not None:
            # Else it is left to the query's next run.
            self._checkpoints.delete(self.run.index.take_free(whole))

    async def _look(self) -> None:
        """Take over what the records say: those of the query that the location belongs to.

        Raises:
            CorruptData: One of them is damaged.
            Invalid: The location is another query's.
        """
        began = self._clock.now()
        scan = await self._manifests.scan()
        self._owner = scan.query_id
        self.run.index = FileIndex()
        skipped = scan.damaged if self._manifests.skips_damaged else {}
        if skipped:
            # A damaged commit is a batch that Spark runs again.
            scan = replace(scan, damaged={})
        for _, error in sorted(scan.damaged.items()):
            raise error
        # Without a whole one a fence is all that there is.
        is_here = any(record.files is not None and record.files.is_whole for record in scan.records.values())
        steps = file_steps(scan, self.reader.store.location, scan.query_id) if is_here else []
        if skipped:
            steps = _with_offsets(steps)
        await self._take_over(steps, scan.tail, began)
        # Behind damaged records the next one is whole, so that later starts need none of those.
        self._whole = steps[0][0] if steps and not skipped else 0
        if not self.is_unknown:
            await self._settle(scan)

    def _check_owner(self, query_id: str) -> None:
        query_id, owner = query_id or self._query_id, self._owner or self._query_id
        if query_id and owner not in ("", query_id):
            root = self.participants.root
            raise Invalid(
                f"{self.reader.store.location} belongs to query {owner}; this is query {query_id}: {root} has no "
                "checkpoint directory of that query. Give this query a location of its own, or copy the checkpoint "
                f"directory that it had into {self.reader.plain.location} first, which is taken over from there"
            )

    def _needs(self, name: str) -> bool:
        return self.run.index.needs(name, self._whole)


def _with_offsets(steps: list[tuple[int, FileRecord]]) -> list[tuple[int, FileRecord]]:
    """Return the steps before a batch whose offsets are lost, which Spark runs again: what its sources said is, too."""
    batches: dict[str, set[int]] = {"offsets": set(), "commits": set()}
    for at, (_, files) in enumerate(steps):
        for kind, known in batches.items():
            known -= {barrier_batch(path, kind) for path in files.removed}
            known |= {n for row in files.added if (n := barrier_batch(row[0], kind)) is not None}
        if max(batches["commits"], default=-1) > max(batches["offsets"], default=-1):
            return steps[:at]
    return steps


def query_id_of(metadata: bytes) -> str:
    """Return the query's id by Spark's ``metadata`` file.

    Raises:
        Invalid: It names none.
    """
    found = json_field(metadata, "id")
    if not isinstance(found, str) or not found:
        raise Invalid("Spark's metadata file names no query: it is of another make than this DSTL knows")
    return found


def json_field(content: bytes, name: str) -> Any:
    """Return a field of the first line of a file of Spark's that is a JSON object and has it; None without one."""
    for line in content.split(b"\n"):
        try:
            plain = json.loads(line)
        except ValueError:
            continue
        if isinstance(plain, dict) and name in plain:
            return plain[name]
    return None
