"""The hosts' file services, as their coordinator sees them: placed, enlisted, called, and lost."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass

from dstl.errors import DstlError, TaskManagerLost, Unavailable
from dstl.rpc.client import Address, AsyncConnection
from dstl.rpc.codec import Call, R
from dstl.rpc.file_messages import CompleteFiles, EnlistedFiles, EnlistFiles, PersistedFiles, PersistFiles, ResetFiles
from dstl.rpc.handshake import Role
from dstl.rpc.protocol import Secret
from dstl.rpc.server import Peer
from dstl.runtime import Runtime
from handles.segment_handle import SegmentHandle

__all__ = ["HostRegistry", "RemoteHost"]

_LAUNCH_S = 30.0


class RemoteHost:
    """Another host's service. One event loop.

    Args:
        address: Where it listens.
        secret: The application's.
    """

    def __init__(self, address: Address, secret: Secret) -> None:
        self.address = address
        self._secret = secret
        self._connection: AsyncConnection | None = None
        self._turn = asyncio.Lock()

    async def persist(self, root: str, run: str, version: int) -> PersistedFiles:
        """Make what it has durable, or hand it over."""
        return await self._call(PersistFiles(root, run, version))

    async def complete(self, root: str, located: Mapping[str, SegmentHandle]) -> None:
        """The record is durable."""
        rows = tuple((seal, h.name, h.size, h.checksum, h.offset) for seal, h in located.items())
        await self._call(CompleteFiles(root, rows))

    async def reset(self, root: str) -> None:
        """The record was certainly not written."""
        await self._call(ResetFiles(root))

    def close(self) -> None:
        """Close the connection. Idempotent."""
        if self._connection is not None:
            self._connection.close()

    async def _call(self, message: Call[R]) -> R:
        try:
            async with self._turn:
                if self._connection is None or self._connection.is_broken:
                    self._connection = await AsyncConnection.open(self.address, self._secret, role=Role.COORDINATOR)
            return await self._connection.call(message)
        except Unavailable as error:
            if self._connection is not None and not self._connection.is_broken:
                raise  # its own words: the store did not answer it
            raise TaskManagerLost(f"the file service of {self.address.host} is gone: restart the query") from error


@dataclass(slots=True)
class _Place:
    member: str
    socket: str
    since: float


class HostRegistry:
    """Knows which host has a service, and says which executor is to start one. One event loop.

    Args:
        own_host: The coordinator's host as Spark names it; its executors use the coordinator itself.
        own_socket: The coordinator's socket.
        secret: The application's.
        runtime: Clock and ids.
        on_lost: Told when a service is gone.
    """

    def __init__(
        self, own_host: str, own_socket: str, secret: Secret, runtime: Runtime, on_lost: Callable[[str], None]
    ) -> None:
        self.hosts: dict[str, RemoteHost] = {}
        self._secret = secret
        self._runtime = runtime
        self._on_lost = on_lost
        self._own_socket = own_socket
        self._places: dict[str, _Place] = {own_host: _Place("", own_socket, 0.0)}

    def place(self, host: str, lost: str) -> tuple[str, str]:
        """Return the socket of a host's service, or the name under which the caller is to start it.

        Both are empty where another executor of the host is starting it.

        Args:
            host: The executor's, as Spark names it.
            lost: The socket at which nobody answers the executor.
        """
        place = self._places.get(host)
        now = self._runtime.clock.now()
        if place is not None:
            alive = place.member in self.hosts or place.socket == self._own_socket
            if place.socket and place.socket != lost and alive:
                return place.socket, ""
            if not place.socket and now - place.since < _LAUNCH_S:
                return "", ""
        member = f"{host}-{self._runtime.new_id()[:8]}"
        self._places[host] = _Place(member, "", now)
        return "", member

    async def enlist(self, peer: Peer, call: EnlistFiles) -> EnlistedFiles:
        """Take a service in; its connection is its lease of life."""
        host = RemoteHost(call.address, self._secret)
        self.hosts[call.member] = host
        self._places[call.address.host] = _Place(call.member, call.address.path, self._runtime.clock.now())

        def lost() -> None:
            if self.hosts.pop(call.member, None) is not None:
                host.close()
                self._on_lost(call.member)

        peer.on_lost = lost
        return EnlistedFiles()

    def close(self) -> None:
        """Close all connections. Idempotent."""
        for host in self.hosts.values():
            with suppress(DstlError):
                host.close()
