"""The directories that a process has open: the coordinator's beside the driver, and those of a TaskManager's host."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from dstl.checkpoint.fleet.members import Members
from dstl.checkpoint.fleet.resource_manager import Enlistment, LaunchPlan
from dstl.errors import DstlError, Fenced, Invalid, Unavailable
from dstl.files.config import FileConfig
from dstl.files.file_cache import FileCache
from dstl.files.file_log import FileLog
from dstl.files.leader import LeaderDirectory, own_directory
from dstl.files.namespace import is_of_a_backend, location_of, plain_location_of
from dstl.files.open_directories import OpenDirectories
from dstl.files.origins import Origins
from dstl.files.reader import FileReader
from dstl.files.remote import RemoteDirectory
from dstl.files.roots import CheckpointRoots, RootProbe
from dstl.files.service import FileService
from dstl.options import S3Options, SealingOptions
from dstl.rpc.async_connection import AsyncConnection
from dstl.rpc.client import Address
from dstl.rpc.file_messages import (
    EndRun,
    FindFile,
    FoundFile,
    LeavingHost,
    PlacedFiles,
    PlaceFiles,
    ServedRoot,
    ServeRoot,
    StoredFiles,
)
from dstl.rpc.fleet_messages import Abort, Complete, Enlist, Persist, Persisted, Register
from dstl.rpc.messages import Done
from dstl.rpc.protocol import Secret
from dstl.rpc.server import Peer
from dstl.runtime import Runtime
from dstl.store import open_store
from dstl.store.base import ObjectStore

_log = logging.getLogger(__name__)

OpenStore = Callable[[str, S3Options, SealingOptions], ObjectStore]
"""Opens the store of a location."""


class FileProcess:
    """The directories that a process has open. One event loop.

    Args:
        config: Options of logs and stores.
        runtime: Clock, jitter and ids.
        open_store: Opens a location.
    """

    def __init__(self, config: FileConfig, runtime: Runtime, open_store: OpenStore) -> None:
        self._config = config
        self._runtime = runtime
        self._open_store = open_store
        self._cache = FileCache()

    def origins(self, root: str) -> Origins:
        """Return the locations whose objects a directory may use."""
        return Origins(root, self._config.files.also, self._open)

    def open_log(self, root: str) -> FileLog:
        """Open the log of a directory, over its store and that of its plain files.

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
        reader = FileReader(store, plain, self._runtime, self._cache, self.origins(root))
        return FileLog(self._config, self._runtime, reader, self._open(location_of(root)))

    def _open(self, location: str) -> ObjectStore:
        return self._open_store(location, self._config.s3, self._config.sealing)


class FileCoordinator(FileProcess):
    """Coordinates the directories of an application, and serves the driver's host.

    Args:
        host: The driver's, as Spark names it.
        secret: The application's.
        config: Options of all processes.
        runtime: Clock, jitter and ids.
        open_store: Opens a location.

    Attributes:
        service: Its calls; the maker lets ``service.server`` listen.
        address: Where it listens, once it does.
        directories: Those that are open.
    """

    def __init__(
        self, host: str, secret: Secret, config: FileConfig, runtime: Runtime, open_store: OpenStore = open_store
    ) -> None:
        super().__init__(config, runtime, open_store)
        self.address = Address(host)
        self.directories = OpenDirectories(self._opened)
        self._members = Members(secret, self._lost, host)
        self._enlistment = Enlistment(self._members, runtime, plan=LaunchPlan(), config=config.to_json())
        self._roots = CheckpointRoots(RootProbe(self._open, runtime))
        self.service = FileService(
            self.directories.of,
            self._roots,
            secret,
            {
                PlaceFiles: self._place,
                Enlist: self._enlistment.enlist,
                Register: self._enlistment.register,
                ServeRoot: self._serve,
                StoredFiles: self._store,
                LeavingHost: self._leave,
                FindFile: self._find,
                EndRun: self._end_run,
            },
        )

    async def close(self) -> None:
        """Store what waits, and end. Idempotent."""
        await self.service.server.close()
        self._members.close()
        await self.directories.close()

    def _opened(self, root: str) -> LeaderDirectory:
        found = own_directory(root, self.open_log(root), self._members.all, self._runtime, self._config)
        # Tasks may outlive their run: nothing of theirs may take the directory over from another driver.
        for run in self.directories.ended:
            found.run.end(run, Fenced("its query has ended"))
        return found

    async def _end_run(self, peer: Peer, call: EndRun) -> Done:
        self.directories.end_run(call.run)
        members = list(self._members.all.values())
        # One that does not answer is lost, and so is what it has of the run.
        await asyncio.gather(*(member.call(EndRun(call.run)) for member in members), return_exceptions=True)
        return Done()

    def _lost(self, member: str) -> None:
        _log.warning("the file service %s is gone", member)
        for directory in self.directories:
            directory.run.lose(member)

    async def _place(self, peer: Peer, call: PlaceFiles) -> PlacedFiles:
        own = self.address
        if call.host == own.host:
            return PlacedFiles(own.path, "", own.host, own.port)
        found, member = self._enlistment.place(call.host, call.lost)
        return PlacedFiles(found.path if found is not None else "", member, own.host, own.port)

    async def _serve(self, peer: Peer, call: ServeRoot) -> ServedRoot:
        directory = await self.directories.of(call.root)
        return ServedRoot(await directory.serve(call.member, call.run))

    async def _store(self, peer: Peer, call: StoredFiles) -> Done:
        part = Persisted(call.segments, (), files=call.files)
        (await self.directories.of(call.root)).run.store(call.member, call.run, part)
        return Done()

    async def _leave(self, peer: Peer, call: LeavingHost) -> Done:
        for directory in self.directories:
            directory.run.leave(call.member)
        return Done()

    async def _find(self, peer: Peer, call: FindFile) -> FoundFile:
        path = await self._roots.find(call.path, call.run)
        if path is None:
            return FoundFile(None)
        return FoundFile(await (await self.directories.of(path.root)).entry(path.inner, call.run))


class FileHost(FileProcess):
    """Serves the JVMs of one host for a coordinator elsewhere.

    Args:
        member_id: Its name in the fleet.
        secret: The application's.
        config: Options of all processes.
        runtime: Clock, jitter and ids.
        open_store: Opens a location.
        coordinator: Who decides; closed with this.

    Attributes:
        service: Its calls; the maker lets ``service.server`` listen.
        directories: Those that are open.
    """

    def __init__(
        self,
        member_id: str,
        secret: Secret,
        config: FileConfig,
        runtime: Runtime,
        open_store: OpenStore,
        coordinator: AsyncConnection,
    ) -> None:
        super().__init__(config, runtime, open_store)
        self._member_id = member_id
        self._coordinator = coordinator
        self.directories = OpenDirectories(self._opened)
        self.service = FileService(
            self.directories.of,
            # A host looks for no root: whether there is one its coordinator says.
            CheckpointRoots(is_root=True),
            secret,
            {Persist: self._persist, Complete: self._complete, Abort: self._abort, EndRun: self._end_run},
        )

    async def hand_over(self) -> None:
        """Store all that no record holds, and tell the coordinator that nothing is lost with this service."""
        try:
            for directory in self.directories:
                await directory.hand_over()
            await self._coordinator.call(LeavingHost(self._member_id))
        except DstlError as error:
            _log.error("what this host's tasks have put since the last commit is lost: %s", error)

    async def close(self) -> None:
        """Drop what the coordinator has not taken. Idempotent."""
        await self.service.server.close()
        await self.directories.close()
        self._coordinator.close()

    def _opened(self, root: str) -> RemoteDirectory:
        options = self._config.files
        return RemoteDirectory(root, self._member_id, self.open_log(root), self._coordinator, self._runtime, options)

    async def _end_run(self, peer: Peer, call: EndRun) -> Done:
        self.directories.end_run(call.run)
        return Done()

    async def _persist(self, peer: Peer, call: Persist) -> Persisted:
        commit = call.files
        if commit is None:
            raise Invalid("a TaskManager without tables persists files, of a checkpoint directory that the call names")
        directory = await self.directories.of(commit.root)
        # Whoever asks anew cannot say what became of the last record: its word was lost, or there was none.
        directory.log.abandon()
        directory.committing(commit.version - 1)
        directory.log.end_other_runs(commit.run)
        try:
            async with asyncio.timeout(call.timeout_s):
                return await directory.log.persist(commit.run, version=commit.version)
        except TimeoutError:
            raise Unavailable(f"the store did not take the files within {call.timeout_s:g} s") from None

    async def _complete(self, peer: Peer, call: Complete) -> Done:
        (await self.directories.of(call.root)).log.complete(call.located)
        return Done()

    async def _abort(self, peer: Peer, call: Abort) -> Done:
        (await self.directories.of(call.root)).log.reset()
        return Done()
