"""A socket of a simulated worker: blocking code sends and receives, and its stack stands still while nothing has come.

What has come waits in a pair of real sockets, so that the product can poll it.
"""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from contextlib import suppress
from typing import Any

from tests.simulation.blocking import Wait
from tests.simulation.network import Network


class BlockingSocket(asyncio.Protocol):
    """A connected socket as :class:`dstl.rpc.frame_socket.FrameSocket` uses it.

    Args:
        network: Where it connects.
        port: To which port.
        wait: Runs a coroutine on the loop while the calling stack stands still.

    Raises:
        ConnectionRefusedError: Nobody listens there.
    """

    family = -1  # of none that knows an option

    def __init__(self, network: Network, port: int, wait: Wait) -> None:
        self._network = network
        self._wait = wait
        self._end: Any = None
        self._error: BaseException | None = None
        self._timeout: float | None = None
        self._coming: deque[bytes] = deque()
        self._moved: asyncio.Future[None] | None = None
        if network.closed:
            raise ConnectionRefusedError(f"port {port}: the world has ended")
        self._near, self._far = socket.socketpair()
        network.sockets.append(self)
        for each in (self._near, self._far):
            each.setblocking(False)
        wait(network.connect(lambda: self, port))

    # As a protocol of the simulated connection.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """It is connected."""
        self._end = transport

    def data_received(self, data: bytes) -> None:
        """Bytes have come."""
        self._coming.append(data)
        self._push()

    def eof_received(self) -> None:
        """The other side has ended."""
        self._coming.append(b"")
        self._push()

    def connection_lost(self, error: BaseException | None) -> None:
        """The connection broke, or was closed."""
        self._error = error
        self.eof_received()

    def _push(self) -> None:
        with suppress(BlockingIOError, OSError):
            while self._coming:
                if not self._coming[0]:
                    self._far.shutdown(socket.SHUT_WR)
                    self._coming.clear()
                    break
                sent = self._far.send(self._coming[0])
                rest = self._coming.popleft()[sent:]
                if rest:
                    self._coming.appendleft(rest)
        if self._moved is not None and not self._moved.done():
            self._moved.set_result(None)

    # As a socket.

    def fileno(self) -> int:
        """Return what can be polled."""
        return self._near.fileno()

    def settimeout(self, timeout: float | None) -> None:
        """Fail when nothing comes for so many seconds."""
        self._timeout = timeout

    def setblocking(self, flag: bool) -> None:
        """Wait, or do not."""
        self._timeout = None if flag else 0.0

    def sendmsg(self, buffers: Any) -> int:
        """Send, and return how much: all of it."""
        if self._error is not None:
            raise self._error
        data = b"".join(buffers)
        self._end.write(data)
        return len(data)

    def recv_into(self, view: memoryview) -> int:
        """Receive what has come, up to the view's length; 0 at the end."""
        while True:
            try:
                got = self._near.recv_into(view)
            except BlockingIOError:
                if self._timeout == 0.0:
                    raise
                self._wait(self._arrival())
                continue
            if not got and self._error is not None:
                raise self._error
            self._push()
            return got

    def close(self) -> None:
        """Close it. Idempotent."""
        if self._end is not None:
            self._end.close()
        self._near.close()
        self._far.close()

    async def _arrival(self) -> None:
        self._moved = asyncio.get_running_loop().create_future()
        await asyncio.wait([self._moved], timeout=self._timeout)
        if not self._moved.done():
            raise TimeoutError("timed out")
