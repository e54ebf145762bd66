"""The calls of Spark's JVMs about files: the same at a coordinator and on a host."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any

from dstl.errors import Invalid, ObjectNotFound, TaskManagerLost
from dstl.files.directory import Directory
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

__all__ = ["FileService"]

_MOST_STAGED = 1 << 30
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
        self._staged: dict[str, list[Payload]] = {}
        self._staged_bytes = 0
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
        content = [*self._unstaged(call.token), call.content]
        if (came := sum(map(len, content))) != call.size:
            raise TaskManagerLost(
                f"{came} of {call.size} bytes of {call.path} are here: the file service of this host, or the "
                "connection to it, has ended while they were written; the task has to run again"
            )
        place = self._roots.place(call.path, call.run)
        directory, path = await self._directory_of(place.root), place.inner
        if not call.overwrite:
            await directory.check_free(path, call.run)
        await directory.put(path, call.run, call.attempt, content)
        return Done()

    async def _stage(self, peer: Peer, call: StagePart) -> Done:
        if self._staged_bytes + len(call.content) > _MOST_STAGED:
            raise Invalid(f"files of more than {_MOST_STAGED} bytes are being written at once: write fewer")
        if call.token not in self._staged:
            # Its connection is its lease: a JVM that has died, or given the file up, will not come for them.
            self._leases.setdefault(peer, []).append(call.token)
            peer.on_lost = partial(self._forget, peer)
        self._staged.setdefault(call.token, []).append(call.content)
        self._staged_bytes += len(call.content)
        return Done()

    async def _delete(self, peer: Peer, call: DeleteFile) -> Done:
        found = await self._roots.find(call.path, call.run)
        if found is not None:
            await (await self._directory_of(found.root)).delete(found.inner, call.run)
        return Done()

    async def _stat(self, peer: Peer, call: StatFile) -> FileStat:
        path = await self._roots.find(call.path, call.run)
        found = await (await self._directory_of(path.root)).find(path.inner, call.run) if path is not None else None
        if found is None:
            return _ABSENT
        return FileStat(found[1], found[2], found[1] < 0)

    async def _list(self, peer: Peer, call: ListFiles) -> FileList:
        path = await self._roots.find(call.path, call.run)
        if path is None:
            return FileList((), False)
        directory = await self._directory_of(path.root)
        entries = await directory.listing(path.inner, call.run)
        found = await directory.find(path.inner, call.run) if not entries else None
        return FileList(tuple(entries), found is not None and found[1] >= 0)

    async def _read(self, peer: Peer, call: ReadFile) -> Fetched:
        path = await self._roots.find(call.path, call.run)
        if path is None:
            raise ObjectNotFound(f"{call.path} is not there")
        content = await (await self._directory_of(path.root)).read(path.inner, call.run)
        return Fetched(memoryview(content)[call.offset : call.offset + call.length])

    def _forget(self, peer: Peer) -> None:
        for token in self._leases.pop(peer, ()):
            self._unstaged(token)

    def _unstaged(self, token: str) -> list[Payload]:
        parts = self._staged.pop(token, []) if token else []
        self._staged_bytes -= sum(map(len, parts))
        return parts
