"""Calls about the files of a checkpoint directory: of Spark's JVMs, of the hosts' file services, of their coordinator.

A path is a whole ``dstl://`` URI. ``run`` is the run of the streaming query that the caller works for; empty where it
works for none.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from dstl.rpc.client import Address
from dstl.rpc.codec import Call, Message, Payload
from dstl.rpc.handshake import Role
from dstl.rpc.messages import Done, Fetched

__all__ = [
    "CompleteFiles",
    "DeleteFile",
    "EnlistFiles",
    "EnlistedFiles",
    "FileList",
    "FileStat",
    "FindFile",
    "FoundFile",
    "LeavingHost",
    "ListFiles",
    "PersistFiles",
    "PersistedFile",
    "PersistedFiles",
    "PlaceFiles",
    "PlacedFiles",
    "PutFile",
    "ReadFile",
    "ResetFiles",
    "ServeRoot",
    "ServedRoot",
    "StagePart",
    "StatFile",
    "StoredFiles",
]


@dataclass(frozen=True, slots=True)
class PutFile(Call[Done]):
    """A file is whole. A barrier is durable when this returns, and so is everything before it.

    Attributes:
        path: Its name.
        run: Whose it is.
        attempt: The task's attempt; negative where no task wrote it.
        overwrite: It may take another's place.
        token: Names what :class:`StagePart` has brought; empty for none.
        size: Bytes of the whole file: staged ones go with the service that they were brought to.
        content: Its bytes, or those behind the staged ones.
    """

    name: ClassVar[str] = "put_file"
    role: ClassVar[Role | None] = Role.WORKER
    path: str
    run: str
    attempt: int
    overwrite: bool
    token: str
    size: int
    content: Payload


@dataclass(frozen=True, slots=True)
class StagePart(Call[Done]):
    """Bytes of a file that is not whole yet, in their order.

    Those of one file come over one connection, and are dropped when it ends before the file is put.
    """

    name: ClassVar[str] = "stage_part"
    role: ClassVar[Role | None] = Role.WORKER
    token: str
    content: Payload


@dataclass(frozen=True, slots=True)
class DeleteFile(Call[Done]):
    """A file, or all files of a directory, are gone; durable with the next barrier."""

    name: ClassVar[str] = "delete_file"
    role: ClassVar[Role | None] = Role.WORKER
    path: str
    run: str


@dataclass(frozen=True, slots=True)
class FileStat(Message):
    """The facts of a path.

    Attributes:
        size: Of a file, in bytes; negative where it is none.
        modified_ms: When it was written, Unix milliseconds.
        is_directory: There are files below it.
    """

    size: int
    modified_ms: int
    is_directory: bool


@dataclass(frozen=True, slots=True)
class StatFile(Call[FileStat]):
    """Asks whether a path is a file or a directory."""

    name: ClassVar[str] = "stat_file"
    path: str
    run: str


@dataclass(frozen=True, slots=True)
class FileList(Message):
    """The names in a directory.

    Attributes:
        entries: ``(name, size, modified_ms)``; the size of a directory is negative.
        is_file: The path is a file's, and no directory's.
    """

    entries: tuple[tuple[str, int, int], ...]
    is_file: bool


@dataclass(frozen=True, slots=True)
class ListFiles(Call[FileList]):
    """Asks for the files and directories in a directory."""

    name: ClassVar[str] = "list_files"
    path: str
    run: str


@dataclass(frozen=True, slots=True)
class ReadFile(Call[Fetched]):
    """Asks for bytes of a file; those that are there are returned."""

    name: ClassVar[str] = "read_file"
    role: ClassVar[Role | None] = Role.WORKER
    path: str
    run: str
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class FoundFile(Message):
    """The place of a file.

    Attributes:
        segment: A ``SegmentHandle`` as on the wire; empty where there is no such file.
        log_id: The log whose change set it is.
        sqn: The change set.
        size: In bytes.
        modified_ms: When it was written.
    """

    segment: tuple[int | str, ...]
    log_id: str
    sqn: int
    size: int
    modified_ms: int


@dataclass(frozen=True, slots=True)
class FindFile(Call[FoundFile]):
    """A host asks its coordinator where a file lies."""

    name: ClassVar[str] = "find_file"
    role: ClassVar[Role | None] = Role.TASK_MANAGER
    path: str
    run: str


@dataclass(frozen=True, slots=True)
class PlacedFiles(Message):
    """The place of a host's file service, or who is to start it.

    Attributes:
        socket: Of its unix socket; empty while there is none.
        member: The service's name, for the caller that is to start it; empty for all others.
        coordinator_host: Where it enlists.
        coordinator_port: Where it enlists.
        options: Spark's ``spark.dstl.*`` settings.
    """

    socket: str
    member: str
    coordinator_host: str
    coordinator_port: int
    options: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class PlaceFiles(Call[PlacedFiles]):
    """The driver asks for the service of an executor's host.

    Attributes:
        host: The executor's, as Spark names it.
        lost: The socket where nobody answers any more; empty for none.
    """

    name: ClassVar[str] = "place_files"
    role: ClassVar[Role | None] = Role.WORKER
    host: str
    lost: str


@dataclass(frozen=True, slots=True)
class EnlistedFiles(Message):
    """The coordinator takes a host's service in: the connection is its lease of life."""


@dataclass(frozen=True, slots=True)
class EnlistFiles(Call[EnlistedFiles]):
    """A host's service says where it listens."""

    name: ClassVar[str] = "enlist_files"
    role: ClassVar[Role | None] = Role.TASK_MANAGER
    member: str
    address: Address


@dataclass(frozen=True, slots=True)
class ServedRoot(Message):
    """A host may take files.

    Attributes:
        batch: The last one that is committed: its tasks come too late. -1 for none.
    """

    batch: int


@dataclass(frozen=True, slots=True)
class ServeRoot(Call[ServedRoot]):
    """A host's service is about to take the first file of a directory since the last commit.

    Refused when the run is over.
    """

    name: ClassVar[str] = "serve_root"
    role: ClassVar[Role | None] = Role.TASK_MANAGER
    member: str
    root: str
    run: str


@dataclass(frozen=True, slots=True)
class PersistedFile:
    """One file, or a deletion, that a host holds for the next record.

    Attributes:
        path: Relative to the directory.
        attempt: The task's; negative where no task wrote it.
        size: In bytes; negative for a deletion.
        modified_ms: When it was written.
        log_id: The log; empty for a deletion.
        sqn: The change set.
        segment: Place in the reply's ``segments``.
    """

    path: str
    attempt: int
    size: int
    modified_ms: int
    log_id: str
    sqn: int
    segment: int


@dataclass(frozen=True, slots=True)
class PersistedFiles(Message):
    """A host tells what it holds of a directory for one record: durable, or to be written inside the record.

    Attributes:
        files: In the order in which they came.
        segments: ``(seal, name, size, checksum, offset)``: a stored segment has no seal; of a seal ``offset`` is the
            place of its bytes in ``inlined``.
        has_more: Snapshots are left for a later record, so that losing this host still loses something.
        inlined: Bytes of the seals, back to back.
    """

    files: tuple[PersistedFile, ...]
    segments: tuple[tuple[str, str, int, int, int], ...]
    has_more: bool
    inlined: Payload


@dataclass(frozen=True, slots=True)
class PersistFiles(Call[PersistedFiles]):
    """Make what a run's tasks have put durable, or hand it over, and forget other runs'."""

    name: ClassVar[str] = "persist_files"
    role: ClassVar[Role | None] = Role.COORDINATOR
    root: str
    run: str
    version: int


@dataclass(frozen=True, slots=True)
class CompleteFiles(Call[Done]):
    """The record is durable.

    Attributes:
        located: Where it holds each inlined seal: ``[seal, name, size, checksum, offset]``.
    """

    name: ClassVar[str] = "complete_files"
    role: ClassVar[Role | None] = Role.COORDINATOR
    root: str
    located: tuple[tuple[str, str, int, int, int], ...]


@dataclass(frozen=True, slots=True)
class ResetFiles(Call[Done]):
    """The record was certainly not written: what was persisted for it waits for the next one."""

    name: ClassVar[str] = "reset_files"
    role: ClassVar[Role | None] = Role.COORDINATOR
    root: str


@dataclass(frozen=True, slots=True)
class StoredFiles(Call[Done]):
    """A host has stored files before their record asks for them; refused when the run is over.

    They are those of tasks that end only now (``durability=task``), or of a service that is about to end.

    Attributes:
        member: The host's service.
        root: The directory.
        run: Whose they are.
        files: As in :class:`PersistedFiles`.
        segments: As there; none is a seal.
    """

    name: ClassVar[str] = "stored_files"
    role: ClassVar[Role | None] = Role.TASK_MANAGER
    member: str
    root: str
    run: str
    files: tuple[PersistedFile, ...]
    segments: tuple[tuple[str, str, int, int, int], ...]


@dataclass(frozen=True, slots=True)
class LeavingHost(Call[Done]):
    """A host's service is about to end, and has told by :class:`StoredFiles` all that it had: nothing is lost with it.

    Attributes:
        member: The host's service.
    """

    name: ClassVar[str] = "leaving_host"
    role: ClassVar[Role | None] = Role.TASK_MANAGER
    member: str
