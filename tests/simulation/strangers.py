"""Strangers who reach the ports of a simulated application: of another application, or no client of ours at all."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from dstl.errors import AccessDenied, DstlError
from dstl.rpc.async_connection import AsyncConnection
from dstl.rpc.client import Address
from dstl.rpc.handshake import Role
from dstl.rpc.protocol import Secret, encode_frame
from tests.simulation.world import World

_MET = 0.2
"""Share of the worlds that have some."""
_GARBAGE = (b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\x02\x00", b"".join(encode_frame({"version": 1})), b"")


async def knock(world: World) -> None:
    """Knock at whatever listens, in some worlds: nobody is let in, and nobody else notices (I21)."""
    rng = world.rng("strangers")
    if rng.random() >= _MET:
        return
    process, number = world.process("world.stranger"), 0
    while True:
        await asyncio.sleep(rng.uniform(0.2, 20.0))
        ports = list(world.network.listeners)
        if not ports:
            continue
        number += 1
        address, says = Address("simulated", rng.choice(ports)), rng.choice((None, None, *_GARBAGE))
        work = _of_another_application(world, address) if says is None else _babble(address, says)
        process.spawn(work, f"knock-{number}")


async def _of_another_application(world: World, address: Address) -> None:
    try:
        line = await AsyncConnection.open(address, Secret.generate(), role=Role.TASK_MANAGER)
    except AccessDenied:
        world.trace("refused", "a stranger")
    except DstlError:
        pass  # the network's faults are a stranger's, too
    else:
        line.close()
        world.check.fail("I21", f"{address} has let somebody in who does not know its secret")


async def _babble(address: Address, says: bytes) -> None:
    with suppress(OSError, asyncio.IncompleteReadError, TimeoutError):
        reader, writer = await asyncio.open_connection(address.host, address.port)
        try:
            async with asyncio.timeout(30.0):
                writer.write(says)
                await reader.read()
        finally:
            writer.close()
