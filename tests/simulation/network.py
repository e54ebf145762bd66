"""Sockets in memory: the loop's own connections between simulated processes, with latency, resets and partitions.

Only ``create_server`` and ``create_connection`` are replaced, so asyncio's streams, our frames and our handshake run
as they are. Bytes of one direction keep their order.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any

from tests.simulation.faults import FaultKind, Strike
from tests.simulation.process import Process, ProcessLoop

ProtocolFactory = Callable[[], asyncio.BaseProtocol]

_THREAD_S = 1.0
"""The longest that work in a thread takes; most takes a few hundredths of it."""
_HELD_S = 60.0
"""Seconds by which a message that is held back comes late, and with it those behind it."""


class _Listener:
    """The server that ``create_server`` returns; also its own only socket."""

    def __init__(self, network: Network, process: Process | None, factory: ProtocolFactory, port: int) -> None:
        self.network = network
        self.process = process
        self.factory = factory
        self.port = port
        self.sockets = (self,)

    def getsockname(self) -> tuple[str, int]:
        return "simulated", self.port

    def fileno(self) -> int:
        """Return that it is not a file of the kernel's."""
        return -1

    def close(self) -> None:
        self.network.listeners.pop(self.port, None)

    async def wait_closed(self) -> None:
        """Nothing is left to wait for."""


class _End(asyncio.Transport):
    """One end of a connection; also its own socket, of no family that knows an option."""

    family = -1

    def __init__(self, network: Network, process: Process | None) -> None:
        super().__init__()
        self._network = network
        self.process = process
        self.peer: _End
        self.protocol: Any = None
        self.closing = False
        self._arrives = 0.0

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self if name == "socket" else default

    def is_closing(self) -> bool:
        return self.closing

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """Buffers are as large as they must be."""

    def get_write_buffer_size(self) -> int:
        return 0

    def pause_reading(self) -> None:
        """Readers are told at once: a simulated frame is small."""

    def resume_reading(self) -> None:
        """See :meth:`pause_reading`."""

    def is_reading(self) -> bool:
        return not self.closing

    def write(self, data: Any) -> None:
        if not self.closing:
            self._send(self.peer.receive, bytes(data))

    def writelines(self, list_of_data: Any) -> None:
        self.write(b"".join(list_of_data))

    def can_write_eof(self) -> bool:
        return False

    def close(self) -> None:
        if self.closing:
            return
        self.closing = True
        self._network.ends.pop(self, None)
        self._send(self.peer.end, None)
        self._network.loop.call_soon(self.lose, None, context=self._context())

    def abort(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Break the connection, as a peer's death or a middlebox does: both ends hear of it unless they are dead."""
        if self.closing and self.peer.closing:
            return
        for end in (self, self.peer):
            self._network.ends.pop(end, None)
            if not end.closing:
                end.closing = True
                error = ConnectionResetError("reset (simulated)")
                self._network.loop.call_later(self._network.latency(), end.lose, error, context=end._context())

    def receive(self, data: bytes) -> None:
        if not self.closing and self.protocol is not None:
            self.protocol.data_received(data)

    def end(self, _: object) -> None:
        if not self.closing and self.protocol is not None:
            self.protocol.eof_received()

    def lose(self, error: Exception | None) -> None:
        protocol, self.protocol = self.protocol, None
        self._network.ends.pop(self, None)
        if protocol is not None:
            protocol.connection_lost(error)

    def _context(self) -> Any:
        return self.process.context if self.process is not None else None

    def _send(self, deliver: Callable[[Any], None], data: bytes | None) -> None:
        network = self._network
        if network.closed:
            return
        struck = network.struck("message")
        if struck is FaultKind.CONNECTION_RESET:
            self.reset()
            return
        at = network.loop.time() + network.latency() + (_HELD_S if struck else 0.0)
        until = network.partitioned_until(self.process, self.peer.process)
        if until is not None and until > at:
            at = until
            network.count("partition")
        # Strictly later than what was sent before: a stream keeps its order.
        self._arrives = at = max(at, self._arrives + 1e-9)
        network.loop.call_at(at, deliver, data, context=self.peer._context())


class Network:
    """All listeners and connections of a world.

    Args:
        loop: The world's.
        rng: Latencies.
        count: Told the name of each fault that took effect.
    """

    def __init__(self, loop: ProcessLoop, rng: random.Random, count: Callable[[str], None]) -> None:
        self.loop = loop
        self.count = count
        self.listeners: dict[int, _Listener] = {}
        self.ends: dict[_End, None] = {}
        self.closed = False
        self.strike: Strike | None = None
        self.sockets: list[Any] = []
        self._made: list[_End] = []
        self._rng = rng
        self._ports = 1024
        self._partitions: dict[tuple[str, str], float] = {}

    def latency(self) -> float:
        """Seconds that a message takes: a tenth to a few milliseconds, now and then more."""
        latency = self._rng.uniform(0.0001, 0.001)
        return latency * 50 if self._rng.random() < 0.01 else latency

    def partition(self, first: Process, second: Process, seconds: float) -> None:
        """Hold every message between two processes back for a while; no connection breaks."""
        self._partitions[_pair(first, second)] = self.loop.time() + seconds

    def partitioned_until(self, first: Process | None, second: Process | None) -> float | None:
        """Return when messages between two processes pass again; None where they do."""
        if not self._partitions or first is None or second is None:
            return None
        return self._partitions.get(_pair(first, second))

    def struck(self, where: str) -> FaultKind | None:
        """Count a step of that kind, and return what strikes it."""
        strike = self.strike
        if strike is None or strike.where != where or not strike.hits():
            return None
        self.count(strike.what)
        return strike.what

    def heal(self) -> None:
        """End every partition for what is sent from now on."""
        self._partitions.clear()

    def close(self) -> None:
        """End every connection, when the world has ended: nobody hears of it."""
        self.closed = True
        for end in self._made:
            end.closing = True
        for socket in self.sockets:
            socket.close()

    def reset_one(self) -> bool:
        """Break a connection, any one."""
        ends = [end for end in self.ends if not end.closing]
        if ends:
            ends[self._rng.randrange(len(ends))].reset()
        return bool(ends)

    def listen(self, factory: ProtocolFactory) -> _Listener:
        """Open a port for the current process."""
        self._ports += 1
        process = self.loop.current()
        listener = self.listeners[self._ports] = _Listener(self, process, factory, self._ports)
        if process is not None:
            process.on_death.append(listener.close)
        return listener

    async def connect(self, factory: ProtocolFactory, port: int) -> tuple[_End, asyncio.BaseProtocol]:
        """Connect the current process to a port.

        Raises:
            ConnectionRefusedError: Nobody listens there.
        """
        await asyncio.sleep(self.latency())
        listener = self.listeners.get(port)
        if listener is None or self.closed or self.struck("connection"):
            raise ConnectionRefusedError(f"port {port} is closed (simulated)")
        here, there = _End(self, self.loop.current()), _End(self, listener.process)
        here.peer, there.peer = there, here
        for end in (here, there):
            self._made.append(end)
            self.ends[end] = None
            if end.process is not None:
                end.process.on_death.append(end.reset)
        here.protocol = factory()
        here.protocol.connection_made(here)
        there.protocol = _Accepting(listener, there)
        self.loop.call_later(self.latency(), there.protocol.accept, context=there._context())
        return here, here.protocol


class _Accepting:
    """A connection in the listener's backlog: what arrives before it is accepted is kept."""

    def __init__(self, listener: _Listener, end: _End) -> None:
        self._listener = listener
        self._end = end
        self._early: list[bytes | None] = []

    def accept(self) -> None:
        if self._end.protocol is not self:
            return
        protocol: Any = self._listener.factory()
        self._end.protocol = protocol
        protocol.connection_made(self._end)
        for data in self._early:
            if data is None:
                protocol.eof_received()
            else:
                protocol.data_received(data)

    def data_received(self, data: bytes) -> None:
        self._early.append(data)

    def eof_received(self) -> None:
        self._early.append(None)

    def connection_lost(self, error: Exception | None) -> None:
        """It was never accepted: nobody knows of it."""


class NetworkLoop(ProcessLoop):
    """A process loop whose servers and connections are simulated ones.

    Attributes:
        network: Set by the world before anything connects.
        thread_rng: Draws how long work in a thread takes; None where it takes no time. Then snapshots of tables stay
            open while others write.
    """

    network: Network
    thread_rng: random.Random | None = None

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:  # type: ignore[override]
        """Call the function here and now; the future is done a while later."""
        done = super().run_in_executor(executor, func, *args)
        if self.thread_rng is None:
            return done
        late = self.create_future()
        self.call_later(_THREAD_S * self.thread_rng.random() ** 4, _pass_on, done, late)
        return late

    async def create_server(self, protocol_factory: Any, *args: Any, **options: Any) -> Any:
        """Listen in memory, whatever host and port are asked for."""
        return self.network.listen(protocol_factory)

    async def create_connection(self, protocol_factory: Any, host: Any = None, port: Any = None, **options: Any) -> Any:
        """Connect in memory."""
        return await self.network.connect(protocol_factory, int(port))


def _pass_on(done: asyncio.Future[Any], late: asyncio.Future[Any]) -> None:
    error = done.exception()
    if late.done():
        return
    if error is not None:
        late.set_exception(error)
    else:
        late.set_result(done.result())


def _pair(first: Process, second: Process) -> tuple[str, str]:
    return (first.name, second.name) if first.name < second.name else (second.name, first.name)
