"""The life of a file process: ``coordinator`` beside the driver, ``host`` beside the executors of another host."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass

from dstl.errors import DstlError, Invalid
from dstl.files.coordinated import CoordinatedDirectory, own_directory
from dstl.files.directory import Directory
from dstl.files.file_log import FileLog
from dstl.files.hosted import HostedDirectory
from dstl.files.hosts import HostRegistry
from dstl.files.invitation import FileInvitation, check_version
from dstl.files.namespace import is_of_a_backend, location_of, plain_location_of
from dstl.files.options import FileOptions
from dstl.files.origins import Origins
from dstl.files.roots import CheckpointRoots, RootProbe
from dstl.files.service import FileService
from dstl.option_sources import check_option_names, resolve
from dstl.options import BatchingOptions, HedgingOptions, S3Options, SealingOptions, UploadOptions
from dstl.rpc.client import Address, AsyncConnection
from dstl.rpc.file_messages import (
    CompleteFiles,
    EnlistedFiles,
    EnlistFiles,
    FindFile,
    FoundFile,
    LeavingHost,
    PersistedFiles,
    PersistFiles,
    PlacedFiles,
    PlaceFiles,
    ResetFiles,
    ServedRoot,
    ServeRoot,
    StoredFiles,
)
from dstl.rpc.handshake import Role
from dstl.rpc.messages import Done
from dstl.rpc.server import Peer, RpcServer
from dstl.runtime import Runtime
from dstl.store import open_store
from dstl.store.base import ObjectStore
from dstl.taskmanager.config import TaskManagerConfig
from dstl.taskmanager.task_manager import Changelog, Components
from handles.segment_handle import SegmentHandle
from materializer.scratch_directory import ScratchDirectory

__all__ = ["FileProcess", "HostLife", "OpenStore", "configuration", "coordinating", "hosting"]

_log = logging.getLogger(__name__)

OpenStore = Callable[[str, S3Options, SealingOptions], ObjectStore]
"""Opens the store of a location."""


def configuration(options: Mapping[str, str], environment: Mapping[str, str]) -> TaskManagerConfig:
    """Return the options of logs and stores.

    Args:
        options: Spark's.
        environment: The process's.

    Raises:
        Invalid: A value is wrong, or an option is unknown.
    """
    check_option_names(environment, options)
    return TaskManagerConfig(
        location="",
        batching=resolve("batching", BatchingOptions, None, environment, options),
        upload=resolve("upload", UploadOptions, None, environment, options),
        hedging=resolve("hedging", HedgingOptions, None, environment, options),
        s3=resolve("s3", S3Options, None, environment, options),
        sealing=resolve("sealing", SealingOptions, None, environment, options),
    )


class FileProcess:
    """The directories that a process has open. One event loop.

    Args:
        invitation: What it is.
        config: Options of logs and stores.
        runtime: Clock, jitter and ids.
        open_store: Opens a location.
    """

    def __init__(
        self,
        invitation: FileInvitation,
        config: TaskManagerConfig,
        runtime: Runtime,
        open_store: OpenStore = open_store,
    ) -> None:
        check_version(invitation.version)
        self.invitation = invitation
        self._config = config
        self._runtime = runtime
        self._open_store = open_store
        self._options = FileOptions.of(invitation.options)

    async def listen_tcp(self, server: RpcServer) -> int:
        """Listen for processes of other hosts, where there are any; returns the port.

        Raises:
            Invalid: This host does not have the address.
        """
        host, bind = self.invitation.host, self.invitation.bind
        address = host if bind is None else bind
        try:
            return await server.listen_tcp(address, known_as=host) if address else 0
        except OSError as error:
            raise Invalid(
                f"the file service of {host} cannot listen at {address} ({error.strerror}): give the driver an address "
                "of its own host in spark.driver.bindAddress, and each executor a name that its host has"
            ) from None

    def origins(self, root: str) -> Origins:
        """Return the locations whose objects a directory may use."""
        return Origins(root, self._options.also, self._open)

    def components(self, root: str) -> tuple[ObjectStore, ObjectStore, FileLog]:
        """Open the store of a directory, that of its plain files, and its log.

        Raises:
            Invalid: The root names no location, or that of a ``StateBackend``.
        """
        if is_of_a_backend(root):
            raise Invalid(
                f"{root} lies in the log of a StateBackend, which alone serves it: ask it for checkpoint_location in "
                "this very driver, and keep Spark's own stateful operators out of the query, whose executors would "
                "write there"
            )
        store, plain = self._open(location_of(root)), self._open(plain_location_of(root))
        changelog = Changelog(self._config, Components(store=store, runtime=self._runtime), "files")
        return store, plain, FileLog(changelog, self._runtime, self._config.batching.inline_threshold)

    def _open(self, location: str) -> ObjectStore:
        return self._open_store(location, self._config.s3, self._config.sealing)


class _Coordinator(FileProcess):
    """Coordinates the directories of an application, and serves the driver's host."""

    def __init__(
        self,
        invitation: FileInvitation,
        config: TaskManagerConfig,
        runtime: Runtime,
        open_store: OpenStore,
        socket: str,
    ) -> None:
        super().__init__(invitation, config, runtime, open_store)
        self._directories: dict[str, CoordinatedDirectory] = {}
        self._registry = HostRegistry(invitation.host, socket, invitation.secret, runtime, self._lost)
        self._port = 0
        self._roots = CheckpointRoots(RootProbe(self._open, runtime))
        self.service = FileService(
            self._directory,
            self._roots,
            invitation.secret,
            {
                PlaceFiles: self._place,
                EnlistFiles: self._enlist,
                ServeRoot: self._serve,
                StoredFiles: self._store,
                LeavingHost: self._leave,
                FindFile: self._find,
            },
        )

    async def listen(self, socket: str) -> None:
        await self.service.server.listen_unix(socket)
        self._port = await self.listen_tcp(self.service.server)

    async def close(self) -> None:
        await self.service.server.close()
        self._registry.close()
        for directory in self._directories.values():
            await directory.close()

    def _opened(self, root: str) -> CoordinatedDirectory:
        known = self._directories.get(root)
        if known is None:
            store, plain, log = self.components(root)
            hosts = self._registry.hosts
            known = own_directory(root, store, plain, log, hosts, self._runtime, self._options, self.origins(root))
            self._directories[root] = known
        return known

    async def _directory(self, root: str) -> Directory:
        return self._opened(root)

    def _lost(self, member: str) -> None:
        _log.warning("the file service %s is gone", member)
        for directory in self._directories.values():
            directory.run.lose(member)

    async def _place(self, peer: Peer, call: PlaceFiles) -> PlacedFiles:
        socket, member = self._registry.place(call.host, call.lost)
        return PlacedFiles(socket, member, self.invitation.host, self._port, self.invitation.options)

    async def _enlist(self, peer: Peer, call: EnlistFiles) -> EnlistedFiles:
        return await self._registry.enlist(peer, call)

    async def _serve(self, peer: Peer, call: ServeRoot) -> ServedRoot:
        return ServedRoot(await self._opened(call.root).serve(call.member, call.run))

    async def _store(self, peer: Peer, call: StoredFiles) -> Done:
        part = PersistedFiles(call.files, call.segments, False, b"")
        await self._opened(call.root).store(call.member, call.run, part)
        return Done()

    async def _leave(self, peer: Peer, call: LeavingHost) -> Done:
        for directory in self._directories.values():
            directory.run.leave(call.member)
        return Done()

    async def _find(self, peer: Peer, call: FindFile) -> FoundFile:
        path = await self._roots.find(call.path, call.run)
        entry = await self._opened(path.root).entry(path.inner) if path is not None else None
        if entry is None:
            return FoundFile((), "", 0, -1, 0)
        handle = entry.segment
        place = (handle.name, handle.size, handle.checksum, handle.offset)
        return FoundFile(place, entry.log_id, entry.sqn, entry.size, entry.modified_ms)


async def _ask_coordinator(root: str) -> bool:
    """A host looks for no root: whether there is one its coordinator says."""
    return True


class _Host(FileProcess):
    """Serves the JVMs of one host for a coordinator elsewhere."""

    def __init__(
        self,
        invitation: FileInvitation,
        config: TaskManagerConfig,
        runtime: Runtime,
        open_store: OpenStore,
        coordinator: AsyncConnection,
    ) -> None:
        super().__init__(invitation, config, runtime, open_store)
        self._coordinator = coordinator
        self._directories: dict[str, HostedDirectory] = {}
        self.service = FileService(
            self._directory,
            CheckpointRoots(_ask_coordinator),
            invitation.secret,
            {PersistFiles: self._persist, CompleteFiles: self._complete, ResetFiles: self._reset},
        )

    async def hand_over(self) -> None:
        """Store all that no record holds, and tell the coordinator that nothing is lost with this service."""
        try:
            for directory in self._directories.values():
                await directory.hand_over()
            await self._coordinator.call(LeavingHost(self.invitation.member))
        except DstlError as error:
            _log.error("what this host's tasks have put since the last commit is lost: %s", error)

    async def close(self) -> None:
        await self.service.server.close()
        for directory in self._directories.values():
            await directory.close()
        self._coordinator.close()

    def _opened(self, root: str) -> HostedDirectory:
        known = self._directories.get(root)
        if known is None:
            store, plain, log = self.components(root)
            known = HostedDirectory(
                root,
                self.invitation.member,
                store,
                plain,
                log,
                self._coordinator,
                self._runtime,
                origins=self.origins(root),
                stores_at_once=self._options.durability == "task",
                asks_always=self._options.sources == "keep",
            )
            self._directories[root] = known
        return known

    async def _directory(self, root: str) -> Directory:
        return self._opened(root)

    async def _persist(self, peer: Peer, call: PersistFiles) -> PersistedFiles:
        directory = self._opened(call.root)
        # Whoever asks anew cannot say what became of the last record: its word was lost, or there was none.
        directory.log.abandon()
        directory.committing(call.version - 1)
        directory.log.end_other_runs(call.run)
        return await directory.log.persist(call.run, version=call.version)

    async def _complete(self, peer: Peer, call: CompleteFiles) -> Done:
        located = {seal: SegmentHandle(name, *place) for seal, name, *place in call.located}
        self._opened(call.root).complete(located)
        return Done()

    async def _reset(self, peer: Peer, call: ResetFiles) -> Done:
        self._opened(call.root).log.reset()
        return Done()


@dataclass(frozen=True, slots=True)
class HostLife:
    """A host's service at work.

    Attributes:
        socket: Where it listens.
        orphaned: Done when the coordinator has ended.
        hand_over: Stores all that the service has and leaves it to the coordinator, so that the service may end.
    """

    socket: str
    orphaned: asyncio.Future[None]
    hand_over: Callable[[], Awaitable[None]]


@asynccontextmanager
async def coordinating(
    invitation: FileInvitation, config: TaskManagerConfig, runtime: Runtime, open_store: OpenStore = open_store
) -> AsyncIterator[str]:
    """Be a coordinator, and yield the socket of its service."""
    scratch = ScratchDirectory()
    try:
        socket = str(scratch.path / "files")
        coordinator = _Coordinator(invitation, config, runtime, open_store, socket)
        try:
            await coordinator.listen(socket)
            yield socket
        finally:
            await coordinator.close()
    finally:
        scratch.close()


@asynccontextmanager
async def hosting(
    invitation: FileInvitation, config: TaskManagerConfig, runtime: Runtime, open_store: OpenStore = open_store
) -> AsyncIterator[HostLife]:
    """Be a host's service.

    Raises:
        Unavailable: No coordinator answers.
    """
    if invitation.coordinator is None:
        raise Invalid("a host's file service was invited by nobody")
    scratch = ScratchDirectory()
    lifeline = calls = None
    try:
        socket = str(scratch.path / "files")
        secret, where = invitation.secret, invitation.coordinator
        calls = await AsyncConnection.open(where, secret, role=Role.TASK_MANAGER)
        host = _Host(invitation, config, runtime, open_store, calls)
        try:
            await host.service.server.listen_unix(socket)
            port = await host.listen_tcp(host.service.server)
            lifeline = await AsyncConnection.open(where, secret, role=Role.TASK_MANAGER)
            await lifeline.call(EnlistFiles(invitation.member, Address(invitation.host, port, socket)))
            yield HostLife(socket, asyncio.ensure_future(lifeline.wait_closed_by_peer()), host.hand_over)
        finally:
            await host.close()
    finally:
        for each in (lifeline, calls):
            if each is not None:
                each.close()
        scratch.close()


def described(error: DstlError) -> str:
    """Return an error as the plugin shows it."""
    return f"dstl.errors.{type(error).__name__}: {error}"
