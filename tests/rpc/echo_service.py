"""A server whose calls say how they went: what several modules call, or try to."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

from dstl.errors import Fenced
from dstl.rpc import protocol
from dstl.rpc.client import Address
from dstl.rpc.messages import Done
from dstl.rpc.protocol import Secret
from dstl.rpc.server import Peer, RpcServer
from worlds.echo import Bug, Echo, Echoed, Fail, Flood, TooMuch, Wait, Watch

SECRET = Secret.generate()


class Service:
    """Notes what it is asked; echoes, fails, and waits until it is told to go on."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        self.lost: list[str] = []
        self.release = asyncio.Event()
        self.handlers = {
            Echo: self.echo,
            Fail: self.fail,
            Bug: self.bug,
            Wait: self.wait,
            Watch: self.watch,
            Flood: self.flood,
            TooMuch: self.too_much,
        }

    async def echo(self, peer: Peer, call: Echo) -> Echoed:
        self.seen.append(f"echo {call.n}")
        return Echoed(call.n, call.data)

    async def fail(self, peer: Peer, call: Fail) -> Done:
        self.seen.append("fail")
        raise Fenced("no longer yours")

    async def bug(self, peer: Peer, call: Bug) -> Done:
        raise RuntimeError("a bug")

    async def wait(self, peer: Peer, call: Wait) -> Echoed:
        self.seen.append("wait")
        await self.release.wait()
        return Echoed(99, b"")

    async def watch(self, peer: Peer, call: Watch) -> Done:
        peer.on_lost = lambda: self.lost.append(call.who)
        return Done()

    async def flood(self, peer: Peer, call: Flood) -> Echoed:
        return Echoed(0, b"\0" * (8 << 20))

    async def too_much(self, peer: Peer, call: TooMuch) -> Echoed:
        return Echoed(0, b"\0" * (protocol.MAX_FRAME + 1))


@contextlib.asynccontextmanager
async def serving(unix: str = "", **settings: Any) -> AsyncIterator[tuple[RpcServer, Service, Address]]:
    service = Service()
    server = RpcServer(SECRET, service.handlers, **settings)
    if unix:
        await server.listen_unix(unix)
        address = Address("here", 0, unix)
    else:
        address = Address("127.0.0.1", await server.listen_tcp("127.0.0.1"))
    try:
        yield server, service, address
    finally:
        await server.close()
