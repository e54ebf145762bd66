"""Starts a query from a savepoint: its files become the base of the query's first checkpoint.

The first checkpoint has no log and is of the batch *before* the query's first: so the first batch finds its parent as
any other does, and TaskManagers of any number and table kind restore it as they restore any base. Two modes:

``no_claim``
    The files are copied under the job's own names before the first checkpoint is committed. From then on the savepoint
    may be deleted, and any number of jobs may start from it. Costs one copy of the state, through the driver.
``claim``
    The files stay where they are and are the job's: it deletes each when no retained checkpoint needs it any more.
    Nothing is copied. The savepoint has to be in the job's own location, and ceases to be a savepoint.

Order of a claim: the marker, the checkpoint, then the descriptor is deleted. A crash in between is made good by the
next start of the same query, because the marker names it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Literal

import google_crc32c

from dstl.changelog.object_names import SegmentNames
from dstl.checkpoint.savepoint.format import (
    EndMarker,
    Savepoint,
    SavepointFile,
    SavepointObjects,
    check_savepoint_name,
    descriptor_name,
    directory_of,
)
from dstl.errors import CorruptData, DstlError, Invalid, MissingState, ObjectNotFound
from dstl.runtime import Runtime, all_of
from dstl.store.base import ObjectStore
from handles.checkpoint import CheckpointId, CompletedCheckpoint, OperatorEntry, TruncatedEntry, referenced_objects
from handles.materialized_handle import MaterializedStateHandle

_log = logging.getLogger(__name__)
_TOGETHER = 4  # files of 32 MiB in memory at once

RestoreMode = Literal["no_claim", "claim"]


def savepoint_as_checkpoint(
    savepoint: Savepoint,
    *,
    names: Mapping[str, str] | None = None,
    checkpoint_id: CheckpointId | None = None,
    batch_id: int | None = None,
    query_id: str | None = None,
    run_id: str = "",
    operators: Collection[OperatorEntry] | None = None,
) -> CompletedCheckpoint:
    """Return the checkpoint that has a savepoint's state and nothing else. Pure.

    Args:
        savepoint: The savepoint.
        names: Object names where the checkpoint finds files that lie elsewhere, by their names in the savepoint.
        checkpoint_id: Number of the checkpoint; this and all that follow are the savepoint's own by default.
        batch_id: The batch whose effects it counts as: the one before the query's first.
        query_id: The query.
        run_id: Its run.
        operators: Those that are taken over.
    """
    given = {"checkpoint_id": checkpoint_id, "batch_id": batch_id, "query_id": query_id, "operators": operators}
    held = savepoint.of_the_batch() | {name: value for name, value in given.items() if value is not None}
    names = names or {}
    taken = [entry.uid for entry in held["operators"]]
    return CompletedCheckpoint(
        **held,
        run_id=run_id,
        sequence_base=savepoint.sequence_base,
        materialized=tuple(
            MaterializedStateHandle(
                operator=file.operator,
                materialization_id=0,
                checkpoint=held["checkpoint_id"],
                name=names.get(file.name, savepoint.object_name(file)),
                size=file.size,
                checksum=file.checksum,
                parts=tuple(part[:3] for part in file.parts),
            )
            for file in savepoint.files
            if file.operator in taken
        ),
        # Without its base a key group is lost, not empty.
        truncated=tuple(
            TruncatedEntry(
                operator=uid,
                first_key_group=0,
                last_key_group=savepoint.max_parallelism - 1,
                checkpoint=held["checkpoint_id"],
            )
            for uid in taken
        ),
    )


class SavepointRestore:
    """One savepoint on its way into a new query. One event loop.

    Args:
        source: Location of the savepoint.
        target: The query's location; the same object or another store of it.
        name: The savepoint's name.
        mode: See the module.
        runtime: Clock, jitter, ids.

    Raises:
        Invalid: A claim of a savepoint in another location.
    """

    def __init__(
        self, source: ObjectStore, target: ObjectStore, name: str, mode: RestoreMode, runtime: Runtime
    ) -> None:
        if mode not in ("no_claim", "claim"):
            raise Invalid(f"restore_mode={mode!r} is neither 'no_claim' nor 'claim'")
        self.name = check_savepoint_name(name)
        self.mode = mode
        self._where = source.location
        self._source = SavepointObjects(source, runtime)
        self._target = target
        self._runtime = runtime
        if mode == "claim" and source.location != target.location:
            raise Invalid(
                f"savepoint {name!r} is in {source.location} and the query in {target.location}: a claimed savepoint "
                "has to be in the query's own location. Make it there (dstl savepoint create --to), or restore it "
                "with restore_mode='no_claim'"
            )

    def __str__(self) -> str:
        return f"savepoint {self.name!r} in {self._where}"

    async def load(self, max_parallelism: int) -> Savepoint:
        """Return the descriptor, once it is known that the query may start from it.

        Raises:
            MissingState: There is no such savepoint.
            CorruptData: Its descriptor is damaged.
            Invalid: It has another number of key groups, has ended, or a newer version wrote it.
        """
        savepoint = await self._source.descriptor(self.name)
        if savepoint.max_parallelism != max_parallelism:
            raise Invalid(
                f"{self} has max_parallelism={savepoint.max_parallelism}, and this backend "
                f"{max_parallelism}: a key's group depends on it. Pass max_parallelism={savepoint.max_parallelism}, or "
                "make a savepoint for the other one with dstl.spark.transform_savepoint"
            )
        marker = await self._source.marker(self.name)
        if marker is not None and not (marker.kind == "claim" and self.mode == "claim"):
            done = "is being deleted" if marker.kind == "delete" else f"was claimed by query {marker.query_id}"
            raise Invalid(f"{self} {done}: restore another savepoint")
        return savepoint

    async def first_checkpoint(
        self,
        savepoint: Savepoint,
        *,
        checkpoint_id: CheckpointId,
        batch_id: int,
        query_id: str,
        run_id: str,
        operators: Collection[str],
        check: Callable[[CompletedCheckpoint], None],
    ) -> CompletedCheckpoint:
        """Make the files the query's and return its first checkpoint, to be committed.

        Args:
            savepoint: What :meth:`load` returned.
            checkpoint_id: The number to commit at.
            batch_id: The batch before the query's next: -1 for a new query; or the savepoint's own, which its own
                query may go on from.
            query_id: The query.
            run_id: Its run.
            operators: Uids of the query's operators; state of others stays in the savepoint.
            check: Raises where the query cannot go on from such a checkpoint; called before anything is written.

        Raises:
            MissingState: A file is not there, or the query is further than the savepoint.
            CorruptData: A file is damaged (found here when it is copied, else by the TaskManagers).
            Invalid: ``check`` said so, or another query has claimed the savepoint.
        """
        if batch_id != -1 and (query_id, batch_id) != (savepoint.query_id, savepoint.batch_id):
            raise MissingState(
                f"{self} holds query {savepoint.query_id} after batch {savepoint.batch_id}, and batch {batch_id + 1} "
                f"of query {query_id} needs its state after batch {batch_id}: take a savepoint of that batch, or start "
                "a new query with a new Spark checkpoint directory, whose sources are then read from their start"
            )

        def checkpoint(names: Mapping[str, str], taken: Collection[OperatorEntry]) -> CompletedCheckpoint:
            made = savepoint_as_checkpoint(
                savepoint,
                names=names,
                checkpoint_id=checkpoint_id,
                batch_id=batch_id,
                query_id=query_id,
                run_id=run_id,
                operators=taken,
            )
            return made.model_copy(update={"created_at": self._runtime.clock.wall()})

        check(checkpoint({}, savepoint.operators))
        taken = [entry for entry in savepoint.operators if entry.uid in operators]
        wanted = [file for file in savepoint.files if file.operator in operators]
        if self.mode == "claim":
            await self._claim(savepoint, wanted, query_id)
            return checkpoint({}, taken)
        return checkpoint(await self._copy(savepoint, wanted, query_id), taken)

    async def settle(self, query_id: str, retained: Sequence[CompletedCheckpoint]) -> None:
        """Finish a claim at a start of the query, once its first checkpoint is durable.

        The descriptor goes, for the savepoint has ended, and with it whatever no retained checkpoint needs: the
        files of operators that the query does not have, and what a crash kept from being deleted. Nothing happens for
        a savepoint that this query has not claimed. A failure is logged and made good by the next start.

        Args:
            query_id: The query.
            retained: All its checkpoints, after its fence.
        """
        if self.mode != "claim" or not retained:
            return
        try:
            marker = await self._source.marker(self.name)
            if marker is None or marker.kind != "claim" or marker.query_id != query_id:
                return
            held = {name for checkpoint in retained for name in referenced_objects(checkpoint)}
            there = [info.name for info in await self._source.list(f"{self.name}/")]
            await self._source.delete([n for n in there if n == descriptor_name(self.name)])
            await self._source.delete([n for n in there if n.endswith(".base") and n not in held])
        except DstlError as error:
            _log.warning("something of the claimed %s is left below %s: %s", self, directory_of(self.name), error)

    async def _claim(self, savepoint: Savepoint, wanted: Sequence[SavepointFile], query_id: str) -> None:
        there = {info.name: info.size for info in await self._source.list(f"{self.name}/")}
        for file in wanted:
            size = there.get(savepoint.object_name(file))
            if size is None:
                raise MissingState(self._problem(savepoint, file, "is not there"))
            if size != file.size:
                raise CorruptData(self._problem(savepoint, file, f"has {size} bytes, not {file.size}"))
        own = EndMarker(
            kind="claim", put_id=self._runtime.new_id(), query_id=query_id, created_at=self._runtime.clock.wall()
        )
        if not await self._source.win(own, self.name):
            found = await self._source.marker(self.name)
            if found is None or found.kind != "claim" or found.query_id != query_id:
                whose = f"query {found.query_id}" if found is not None and found.query_id else "a deletion"
                raise Invalid(f"{self} was taken by {whose}: restore another savepoint")

    async def _copy(self, savepoint: Savepoint, wanted: Sequence[SavepointFile], query_id: str) -> dict[str, str]:
        """Copy the files under names of the query's own, a few at a time, and return these by file."""
        target = SavepointObjects(self._target, self._runtime)
        names = SegmentNames(query_id, self._runtime.new_id(), self._runtime)
        places = {file.name: names.new_object("base")(0) for file in wanted}
        turn = asyncio.Semaphore(_TOGETHER)
        copied = 0

        async def copy(file: SavepointFile) -> None:
            nonlocal copied
            async with turn:
                try:
                    data = await self._source.get(savepoint.object_name(file))
                except ObjectNotFound:
                    raise MissingState(self._problem(savepoint, file, "is not there")) from None
                if len(data) != file.size or google_crc32c.value(data) != file.checksum:
                    raise CorruptData(self._problem(savepoint, file, "is damaged"))
                await target.put(places[file.name], data)
            copied += file.size
            _log.info("%s: %d of %d bytes copied to %s", self, copied, savepoint.bytes, self._target.location)

        await all_of(map(copy, wanted))
        return places

    def _problem(self, savepoint: Savepoint, file: SavepointFile, what: str) -> str:
        return (
            f"{self}: {savepoint.object_name(file)} {what}; restore that object from a replica, or start from another "
            "savepoint"
        )
