"""Calls about files of checkpoint directories: of Spark's JVMs, of the hosts' file services, of their coordinator."""

from __future__ import annotations

from dataclasses import dataclass

from dstl.rpc.codec import Call, Message, Payload, R
from dstl.rpc.fleet_messages import PersistedFile, PersistedSegment
from dstl.rpc.handshake import Role
from dstl.rpc.messages import Done, Fetched
from handles.file_record import FileEntry


@dataclass(frozen=True, slots=True)
class PathCall(Call[R]):
    """A call about a path.

    Attributes:
        path: A whole ``dstl://`` URI.
        run: The run of the streaming query that the caller works for; empty where it works for none.
    """

    path: str
    run: str


@dataclass(frozen=True, slots=True)
class PutFile(PathCall[Done], role=Role.WORKER):
    """A file is whole. A barrier is durable when this returns, and so is everything before it.

    Attributes:
        attempt: The task's attempt; negative where no task wrote it.
        overwrite: It may take another's place.
        token: Names what :class:`StagePart` has brought; empty for none.
        size: Bytes of the whole file: staged ones go with the service that they were brought to.
        content: Its bytes, or those behind the staged ones.
    """

    attempt: int
    overwrite: bool
    token: str
    size: int
    content: Payload


@dataclass(frozen=True, slots=True)
class StagePart(Call[Done], role=Role.WORKER):
    """Bytes of a file that is not whole yet, in their order.

    Those of one file come over one connection, and are dropped when it ends before the file is put.
    """

    token: str
    content: Payload


@dataclass(frozen=True, slots=True)
class DeleteFile(PathCall[Done], role=Role.WORKER):
    """A file, or all files of a directory, are gone; durable with the next barrier."""


@dataclass(frozen=True, slots=True)
class FileStat(Message):
    """The facts of a path.

    Attributes:
        size: Of a file, in bytes; negative where it is not a file.
        modified_ms: When it was written, Unix milliseconds.
        is_directory: There are files below it.
    """

    size: int
    modified_ms: int
    is_directory: bool


@dataclass(frozen=True, slots=True)
class StatFile(PathCall[FileStat]):
    """Asks whether a path is a file or a directory."""


@dataclass(frozen=True, slots=True)
class BatchStat(Message):
    """The facts of a batch that Spark is about to commit.

    Attributes:
        lacks_tasks: Tasks of the backend's operators have to run before its commit can be taken.
    """

    lacks_tasks: bool


@dataclass(frozen=True, slots=True)
class StatBatch(PathCall[BatchStat], role=Role.WORKER):
    """The driver's JVM asks about a batch, by the path of its commit, before it puts that into a backend's log."""


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
class ListFiles(PathCall[FileList]):
    """Asks for the files and directories in a directory."""


@dataclass(frozen=True, slots=True)
class ReadFile(PathCall[Fetched], role=Role.WORKER):
    """Asks for bytes of a file; those that are there are returned."""

    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class FoundFile(Message):
    """The place of a file.

    Attributes:
        entry: Where it lies; None where there is no such file.
    """

    entry: FileEntry | None


@dataclass(frozen=True, slots=True)
class FindFile(PathCall[FoundFile], role=Role.TASK_MANAGER):
    """A host asks its coordinator where a file lies."""


@dataclass(frozen=True, slots=True)
class PlacedFiles(Message):
    """The place of a host's file service, or who is to start it.

    Attributes:
        socket: Of its unix socket; empty while there is none.
        member: The service's name, for the caller that is to start it; empty for all others.
        coordinator_host: Where it enlists.
        coordinator_port: Where it enlists.
    """

    socket: str
    member: str
    coordinator_host: str
    coordinator_port: int


@dataclass(frozen=True, slots=True)
class PlaceFiles(Call[PlacedFiles], role=Role.WORKER):
    """The driver asks for the service of an executor's host.

    Attributes:
        host: The executor's, as Spark names it.
        lost: The socket that does not answer any more; empty for none.
    """

    host: str
    lost: str


@dataclass(frozen=True, slots=True)
class ServedRoot(Message):
    """A host may take files.

    Attributes:
        batch: The last one that is committed: its tasks come too late. -1 for none.
    """

    batch: int


@dataclass(frozen=True, slots=True)
class ServeRoot(Call[ServedRoot], role=Role.TASK_MANAGER):
    """A host's service is about to take the first file of a directory since the last commit.

    Refused when the run is over.
    """

    member: str
    root: str
    run: str


@dataclass(frozen=True, slots=True)
class StoredFiles(Call[Done], role=Role.TASK_MANAGER):
    """A host has stored files before their record asks for them; refused when the run is over.

    They are those of tasks that end only now (``durability=task``), or of a service that is about to end.

    Attributes:
        member: The host's service.
        root: The directory.
        run: Whose they are.
        files: As in :class:`~dstl.rpc.fleet_messages.Persisted`.
        segments: As there; none is inlined.
    """

    member: str
    root: str
    run: str
    files: tuple[PersistedFile, ...]
    segments: tuple[PersistedSegment, ...]


@dataclass(frozen=True, slots=True)
class EndRun(Call[Done]):
    """A run of a query has ended: its directories may be closed. A coordinator tells its hosts.

    Attributes:
        run: The run.
    """

    run: str


@dataclass(frozen=True, slots=True)
class LeavingHost(Call[Done], role=Role.TASK_MANAGER):
    """A host's service is about to end, and has told by :class:`StoredFiles` all that it had: nothing is lost with it.

    Attributes:
        member: The host's service.
    """

    member: str
