"""The calls of Spark's JVMs about files: the same at a coordinator and on a host."""

from __future__ import annotations

import asyncio
import mmap
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from functools import partial
from typing import IO, Any

from dstl.errors import ObjectNotFound, TaskManagerLost, Unavailable
from dstl.files.directory import Directory
from dstl.files.namespace import FilePath
from dstl.files.roots import CheckpointRoots
from dstl.rpc.codec import Call, Payload
from dstl.rpc.file_messages import (
    DeleteFile,
    FileList,
    FileStat,
    ListFiles,
    PutFile,
    ReadFile,
    StagePart,
    StatFile,
)
from dstl.rpc.messages import Done, Fetched
from dstl.rpc.protocol import Secret
from dstl.rpc.server import Handler, Peer, RpcServer

_ABSENT = FileStat(-1, 0, False)


class FileService:
    """Serves the file calls of one host's JVMs. One event loop.

    Args:
        directory_of: Returns the directory of a root, opening it where need be.
        roots: Where in a path the root ends.
        secret: Who does not know it is refused.
        handlers: Further calls.
    """

    def __init__(
        self,
        directory_of: Callable[[str], Awaitable[Directory]],
        roots: CheckpointRoots,
        secret: Secret,
        handlers: Mapping[type[Call[Any]], Handler],
    ) -> None:
        self._directory_of = directory_of
        self._roots = roots
        self._staged = StagedFiles()
        self._leases: dict[Peer, list[str]] = {}
        self.server = RpcServer(
            secret,
            {
                PutFile: self._put,
                StagePart: self._stage,
                DeleteFile: self._delete,
                StatFile: self._stat,
                ListFiles: self._list,
                ReadFile: self._read,
                **handlers,
            },
        )

    async def _put(self, peer: Peer, call: PutFile) -> Done:
        content = call.content
        if call.token:
            if content:
                await self._staged.add(call.token, content)
            content = self._staged.take(call.token)
        if len(content) != call.size:
            raise TaskManagerLost(
                f"{len(content)} of {call.size} bytes of {call.path} are here: the file service of this host, or the "
                "connection to it, has ended while they were written; the task has to run again"
            )
        place = self._roots.place(call.path, call.run)
        async with self._using(place, call.run) as directory:
            if not call.overwrite:
                await directory.check_free(place.inner, call.run)
            await directory.put(place.inner, call.run, call.attempt, [content])
        return Done()

    async def _stage(self, peer: Peer, call: StagePart) -> Done:
        leased = self._leases.setdefault(peer, [])
        if call.token not in leased:
            # Its connection is its lease: a JVM that has died, or given the file up, will not come for them.
            leased.append(call.token)
            peer.on_lost = partial(self._forget, peer)
        await self._staged.add(call.token, call.content)
        return Done()

    async def _delete(self, peer: Peer, call: DeleteFile) -> Done:
        found = await self._roots.find(call.path, call.run)
        if found is not None:
            async with self._using(found, call.run) as directory:
                await directory.delete(found.inner, call.run)
        return Done()

    async def _stat(self, peer: Peer, call: StatFile) -> FileStat:
        path, found = await self._roots.find(call.path, call.run), None
        if path is not None:
            async with self._using(path) as directory:
                found = await directory.find(path.inner, call.run)
        if found is None:
            return _ABSENT
        return FileStat(found[1], found[2], found[1] < 0)

    async def _list(self, peer: Peer, call: ListFiles) -> FileList:
        path = await self._roots.find(call.path, call.run)
        if path is None:
            return FileList((), False)
        async with self._using(path) as directory:
            entries = await directory.listing(path.inner, call.run)
            found = await directory.find(path.inner, call.run) if not entries else None
        return FileList(tuple(entries), found is not None and found[1] >= 0)

    async def _read(self, peer: Peer, call: ReadFile) -> Fetched:
        path = await self._roots.find(call.path, call.run)
        if path is None:
            raise ObjectNotFound(f"{call.path} is not there")
        async with self._using(path) as directory:
            return Fetched(await directory.read(path.inner, call.run, call.offset, call.length))

    @asynccontextmanager
    async def _using(self, path: FilePath, writer: str = "") -> AsyncIterator[Directory]:
        """Keep a path's directory open for the body; ``writer`` is the run that changes something there, if any."""
        directory = await self._directory_of(path.root)
        directory.calls += 1
        if writer:
            directory.writers.add(writer)
        try:
            yield directory
        finally:
            directory.calls -= 1

    def _forget(self, peer: Peer) -> None:
        for token in self._leases.pop(peer, ()):
            self._staged.drop(token)


class StagedFiles:
    """Parts of files by tokens. One event loop.

    All tasks of a host may write at once, and a task may keep one file open while it writes others, so that to let
    some of them wait could hold up those that are waited for. They are in files of ``TMPDIR`` that have no names: a
    process that ends in whatever way leaves none.
    """

    def __init__(self) -> None:
        self._files: dict[str, IO[bytes]] = {}

    async def add(self, token: str, content: Payload) -> None:
        """Take the next part of a file.

        Raises:
            Unavailable: The disk does not take it.
        """
        try:
            file = self._files.get(token)
            if file is None:
                file = self._files[token] = tempfile.TemporaryFile()  # noqa: SIM115
            await asyncio.to_thread(file.write, content)
        except OSError as error:
            self.drop(token)
            raise Unavailable(
                f"{tempfile.gettempdir()}, where files wait that tasks are writing, does not take one: "
                f"{error.strerror}; make room there, or give the application another TMPDIR"
            ) from error

    def take(self, token: str) -> Payload:
        """Return the parts of a file as one, which is read from the disk as it is used; nothing where there are none.

        Raises:
            Unavailable: The disk does not take the last of it.
        """
        file = self._files.pop(token, None)
        if file is None:
            return b""
        try:
            with file:
                file.flush()
                return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        except OSError as error:
            raise Unavailable(f"{tempfile.gettempdir()} has lost a file that a task has written: {error}") from error

    def drop(self, token: str) -> None:
        """Forget a file, if it is here."""
        file = self._files.pop(token, None)
        if file is not None:
            file.close()
