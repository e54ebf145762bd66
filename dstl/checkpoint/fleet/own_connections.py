"""Connections to TaskManagers beside those that checkpoints are made over: calls on these hold no checkpoint up."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from weakref import WeakValueDictionary

from dstl.rpc.async_connection import AsyncConnection
from dstl.rpc.client import Address
from dstl.rpc.handshake import Role
from dstl.rpc.protocol import Secret


class OwnConnections:
    """One connection to each TaskManager, opened when it is asked for. One event loop.

    A TaskManager answers the calls of one connection one after the other, so those of another one need not wait for a
    restore or an upload that takes long.

    Args:
        secret: The application's.
        host: The driver's own, where a TaskManager is called by its unix socket.
    """

    def __init__(self, secret: Secret, host: str) -> None:
        self._secret = secret
        self._host = host
        # Of each its own: the others do not wait for one whose host does not answer.
        self._opening: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._open: dict[str, AsyncConnection] = {}

    async def to(self, member_id: str, address: Address) -> AsyncConnection:
        """Return the connection to a TaskManager; another one where a call was given up, or has found it broken.

        Raises:
            Unavailable: It does not answer.
        """
        async with self._opening.setdefault(member_id, asyncio.Lock()):
            connection = self._open.get(member_id)
            if connection is None or connection.is_broken:
                address = address.seen_from(self._host)
                connection = await AsyncConnection.open(address, self._secret, role=Role.COORDINATOR)
                self._open[member_id] = connection
            return connection

    def drop(self, member_id: str) -> None:
        """Close the connection to a TaskManager, if there is one."""
        if (unused := self._open.pop(member_id, None)) is not None:
            unused.close()

    def keep(self, members: Collection[str]) -> None:
        """Close the connections to all others; to none, to close all."""
        for gone in self._open.keys() - set(members):
            self.drop(gone)
