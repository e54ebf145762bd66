"""Savepoints: self-contained, canonical copies of a checkpoint that no cleanup touches.

A checkpoint is the running job's: it shares files with its neighbours and goes when it is subsumed. A savepoint is the
operator's: a copy of the state alone, without states that the query has deleted, in the encoding that every table kind
reads, below ``savepoints/<name>/`` of the same or another location, kept until it is deleted. It holds no source
offsets: those stay in Spark's checkpoint directory.

Order of creation: base files, then the descriptor, put only if absent. So a savepoint is complete or invisible, and of
two that are made under one name at the same time one fails and takes its own files away. Order of deletion: the marker,
the descriptor, the files, the marker again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, closing
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import google_crc32c

from dstl.checkpoint.manifest.reader import ManifestReader
from dstl.checkpoint.savepoint.format import (
    Savepoint,
    SavepointFile,
    SavepointObjects,
    check_savepoint_name,
    descriptor_name,
    directory_of,
    marker_name,
)
from dstl.crash_points import reach
from dstl.errors import CorruptData, DstlError, MissingState, ObjectExists, OutcomeUnknown
from dstl.runtime import Runtime, call_in_thread, end_tasks
from dstl.store.base import ObjectStore
from handles.checkpoint import CheckpointId, CompletedCheckpoint
from handles.key_group import KeyGroup, KeyGroupRange
from materializer.bases.key_group_file import encode_key_group
from materializer.bases.table_directory import FileBases
from materializer.expiry import deleted_states, is_deleted
from materializer.restore.restore import heap_tables
from materializer.tables import Expired, HeapStateTable, StateTable

_UPLOADS = 3  # times the file's size is what they hold in memory


@dataclass(slots=True)
class _OpenFile:
    data: bytearray = field(default_factory=bytearray)
    parts: list[tuple[int, int, int, int]] = field(default_factory=list)


class SavepointFileWriter:
    """Packs key groups into base files, one open file per operator, and stores them while the next are encoded."""

    def __init__(self, objects: SavepointObjects, directory: str, file_bytes: int) -> None:
        self._objects = objects
        self._directory = directory
        self._file_bytes = file_bytes
        self._open: dict[str, _OpenFile] = {}
        self._stored: dict[str, list[SavepointFile]] = {}
        self._uploads: set[asyncio.Task[None]] = set()
        self._names: list[str] = []

    async def write(self, operator: str, table: StateTable | None, key_groups: KeyGroupRange, dropped: Expired) -> None:
        """Add one operator's key groups, without what is dropped; closes the table."""
        table = table if table is not None else HeapStateTable()
        with closing(table), closing(table.snapshot()) as snapshot:
            for group in key_groups:
                # zstd and the checksum let the loop go on meanwhile.
                part = await call_in_thread(encode_key_group, snapshot, group, expired=dropped)
                await self.add(operator, group, part.data, part.rows)

    async def add(self, operator: str, key_group: KeyGroup, data: bytes, rows: int) -> None:
        """Add a key group that is encoded already, of an operator whose key groups come in ascending order."""
        file = self._open.setdefault(operator, _OpenFile())
        file.parts.append((key_group, len(file.data), len(data), rows))
        file.data += data
        if len(file.data) >= self._file_bytes:
            await self._store(operator)

    async def finish(self, operators: Sequence[str]) -> tuple[SavepointFile, ...]:
        """Store what is open, wait for all, and return the files by operator in the given order."""
        for operator in operators:
            if operator in self._open:
                await self._store(operator)
        await self._wait(0)
        return tuple(file for operator in operators for file in self._stored.get(operator, ()))

    async def withdraw(self) -> None:
        """Delete what was stored for a savepoint that did not come to be; the descriptor certainly is not there."""
        await end_tasks(self._uploads)
        try:
            await self._objects.delete(self._names)
        except DstlError as error:
            _log.warning("%d files below %s are left: %s", len(self._names), self._directory, error)

    async def _store(self, operator: str) -> None:
        file = self._open.pop(operator)
        name = f"{self._directory}/{len(self._names):06d}.base"
        data = bytes(file.data)
        relative = "/".join(name.split("/")[2:])
        self._stored.setdefault(operator, []).append(
            SavepointFile(
                operator=operator,
                name=relative,
                size=len(data),
                checksum=google_crc32c.value(data),
                parts=tuple(file.parts),
            )
        )
        self._names.append(name)
        await self._wait(_UPLOADS - 1)
        self._uploads.add(asyncio.ensure_future(self._objects.put(name, data)))

    async def _wait(self, most: int) -> None:
        """Wait until at most so many uploads are under way; raises what one of them raised."""
        while len(self._uploads) > most:
            done, self._uploads = await asyncio.wait(self._uploads, return_when=asyncio.FIRST_COMPLETED)
            # All of them are looked at, so that asyncio reports none as lost.
            for error in [task.exception() for task in done]:
                if error is not None:
                    raise error


_log = logging.getLogger(__name__)

OnProgress = Callable[[int, int], None]
"""Called with how much is done and how much there is."""

TARGET_FILE_BYTES = 32 << 20
"""A base file is closed once it has so many bytes. Larger: fewer objects and requests; smaller: less memory, and a
restore on many TaskManagers shares the reading better."""

_CHUNK_BYTES = 128 << 20
"""Stored bytes of state and log that are rebuilt as tables at once; in memory they take several times as much."""

_TAKES = 5  # each loses against a job only if a whole retention passes meanwhile


def key_group_chunks(checkpoint: CompletedCheckpoint, chunk_bytes: int = _CHUNK_BYTES) -> list[KeyGroupRange]:
    """Cut a checkpoint's key groups into ranges of about so many stored bytes, so that each fits in memory.

    Keys are spread by their hash, so key groups are about the same size.
    """
    groups = checkpoint.max_parallelism
    chunks = max(1, min(groups, -(-checkpoint.full_bytes // chunk_bytes)))
    starts = [index * groups // chunks for index in range(chunks)]
    return [KeyGroupRange(a, b - 1) for a, b in zip(starts, [*starts[1:], groups], strict=True)]


async def choose_checkpoint(
    store: ObjectStore, runtime: Runtime, checkpoint_id: CheckpointId | None = None
) -> CompletedCheckpoint:
    """Return a retained checkpoint of a location, the latest where none is named. Only reads.

    Raises:
        MissingState: There is none, or none of that number.
        CorruptData: Its manifest, or a newer one, is damaged.
    """
    return (await ManifestReader(store, runtime).scan()).choose(checkpoint_id, store.location)


async def create_savepoint(
    source: ObjectStore,
    target: ObjectStore,
    runtime: Runtime,
    name: str,
    *,
    checkpoint_id: CheckpointId | None = None,
    on_progress: OnProgress | None = None,
) -> Savepoint:
    """Make a savepoint of a location's checkpoint; safe while its job runs, for the source is only read.

    A checkpoint that the job subsumes meanwhile may lose files. Where none was named, the newest one is then taken
    anew.

    Args:
        source: The job's location.
        target: Where the savepoint goes; may be the same.
        runtime: Clock, jitter, ids.
        name: The savepoint's name in the target.
        checkpoint_id: A retained checkpoint; None for the latest.
        on_progress: Called with key groups done and in all.

    Raises:
        ObjectExists: The target has a savepoint of that name, or had one that a job has claimed.
        MissingState: No such checkpoint, or it was subsumed while it was copied.
        CorruptData: The checkpoint is damaged.
        OutcomeUnknown: The savepoint may be there: look with list.
    """

    @asynccontextmanager
    async def take() -> AsyncIterator[CompletedCheckpoint]:
        yield await choose_checkpoint(source, runtime, checkpoint_id)

    async def is_retained(checkpoint: CompletedCheckpoint) -> bool:
        scan = await ManifestReader(source, runtime).scan()
        return any(each.checkpoint_id == checkpoint.checkpoint_id for each in scan.retained)

    return await save_newest(
        take,
        lambda checkpoint: save_checkpoint(source, target, runtime, name, checkpoint, on_progress=on_progress),
        is_retained,
        takes=_TAKES if checkpoint_id is None else 1,
    )


async def save_newest(
    take: Callable[[], AbstractAsyncContextManager[CompletedCheckpoint]],
    save: Callable[[CompletedCheckpoint], Awaitable[Savepoint]],
    is_retained: Callable[[CompletedCheckpoint], Awaitable[bool]],
    takes: int = _TAKES,
) -> Savepoint:
    """Save a checkpoint; where its objects vanish because its job has subsumed it, take a newer one.

    Args:
        take: Returns the checkpoint to save, as a context in which it is copied.
        save: Copies it.
        is_retained: Whether a checkpoint is retained still, so that a missing object is damage.
        takes: How many checkpoints are tried.

    Raises:
        MissingState: An object of a retained checkpoint is not there, or every checkpoint was subsumed.
        CorruptData: A retained checkpoint is damaged.
    """
    for number in range(1, takes + 1):
        async with take() as checkpoint:
            try:
                return await save(checkpoint)
            except (MissingState, CorruptData) as error:
                # A base whose files are gone counts as damaged, for a restore would go on with the one before it.
                if await is_retained(checkpoint):
                    raise
                if number == takes:
                    raise MissingState(
                        f"checkpoint {checkpoint.checkpoint_id} was subsumed by its job while it was copied ({error}): "
                        "name a newer one, retain more (CheckpointOptions.retained), or use StateBackend.savepoint in "
                        "the job itself"
                    ) from error
                _log.info("checkpoint %d was subsumed meanwhile; taking a newer one", checkpoint.checkpoint_id)
    raise AssertionError("unreachable")


async def save_checkpoint(
    source: ObjectStore,
    target: ObjectStore,
    runtime: Runtime,
    name: str,
    checkpoint: CompletedCheckpoint,
    *,
    on_progress: OnProgress | None = None,
    file_bytes: int = TARGET_FILE_BYTES,
) -> Savepoint:
    """Copy one checkpoint, whose objects must stay there meanwhile; otherwise as :func:`create_savepoint`.

    Key groups are rebuilt range by range, so memory is bounded by a range (times what tables need above the
    stored bytes) and a few base files, whatever the size of the state.
    """

    sequence_base = checkpoint.sequence_base + checkpoint.checkpoint_id
    content = {**checkpoint.of_the_batch(), "source": source.location, "sequence_base": sequence_base}
    fill = partial(copy_key_groups, checkpoint, source, runtime, on_progress=on_progress)
    return await write_savepoint(target, runtime, name, fill, content, file_bytes=file_bytes)


async def write_savepoint(
    target: ObjectStore,
    runtime: Runtime,
    name: str,
    fill: Callable[[SavepointFileWriter], Awaitable[None]],
    content: Mapping[str, Any],
    *,
    file_bytes: int = TARGET_FILE_BYTES,
) -> Savepoint:
    """Write a savepoint of whatever state: its files, then its descriptor; complete or invisible.

    Args:
        target: Where it goes.
        runtime: Clock, jitter, ids.
        name: Its name in the target.
        fill: Writes every key group of every operator.
        content: What the descriptor says of the state: its fields but for name, put-id, time and files.
        file_bytes: A file is closed once it has so many bytes.

    Raises:
        ObjectExists: The target has a savepoint of that name, or had one that a job has claimed.
        OutcomeUnknown: The savepoint may be there: look with list.
        DstlError: As ``fill`` does; what was stored is deleted then.
    """
    objects = SavepointObjects(target, runtime)
    await _check_free(objects, name)
    unique = runtime.new_id()
    writer = SavepointFileWriter(objects, directory_of(name) + unique, file_bytes)
    try:
        await fill(writer)
        files = await writer.finish([entry.uid for entry in content["operators"]])
        made = {"name": name, "put_id": unique, "created_at": runtime.clock.wall(), "files": files}
        savepoint = Savepoint.model_validate({**content, **made})
    except BaseException:
        await writer.withdraw()
        raise
    reach("S1")
    try:
        won = await objects.win(savepoint, name)
    except OutcomeUnknown:
        # It may be there, or come: what it names stays.
        raise
    except DstlError:
        await writer.withdraw()
        raise
    if not won:
        await writer.withdraw()
        raise ObjectExists(f"{target.location} has a savepoint {name!r} now: another one was made at the same time")
    reach("S2")
    await _check_survived(objects, savepoint)
    return savepoint


async def _check_free(objects: SavepointObjects, name: str) -> None:
    directory = directory_of(check_savepoint_name(name))
    names = {info.name for info in await objects.list(f"{name}/")}
    if descriptor_name(name) in names:
        raise ObjectExists(f"{objects.store.location} has a savepoint {name!r}: delete it, or use another name")
    if marker_name(name) in names:
        raise ObjectExists(
            f"{objects.store.location} had a savepoint {name!r} that was claimed or is being deleted ({directory} is "
            "not empty): use another name, or finish it with dstl savepoint delete"
        )


async def _check_survived(objects: SavepointObjects, savepoint: Savepoint) -> None:
    """Refuse a savepoint whose files were deleted meanwhile, as a failed one's leftovers."""
    there = {info.name for info in await objects.list(f"{savepoint.name}/")}
    gone = [name for name in savepoint.objects() if name not in there]
    if gone:
        await objects.delete([descriptor_name(savepoint.name)])
        raise MissingState(
            f"savepoint {savepoint.name!r} in {objects.store.location}: {gone[0]} was deleted while the savepoint was "
            "being made: make it again"
        )


async def copy_key_groups(
    checkpoint: CompletedCheckpoint,
    source: ObjectStore,
    runtime: Runtime,
    writer: SavepointFileWriter,
    on_progress: OnProgress | None = None,
) -> None:
    """Add every key group of every operator of a checkpoint to a savepoint; see :func:`save_checkpoint`."""
    total = checkpoint.max_parallelism
    async with FileBases(source, runtime) as files:
        for chunk in key_group_chunks(checkpoint):
            async with heap_tables(checkpoint, files, chunk) as tables:
                for entry in checkpoint.operators:
                    deleted = dict.fromkeys(deleted_states(entry.registry), is_deleted)
                    await writer.write(entry.uid, tables.pop(entry.uid, None), chunk, deleted)
            if on_progress is not None:
                on_progress(chunk.end + 1, total)
