"""The serving side of a socket: accept, authenticate, dispatch, bound."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from dstl.errors import AccessDenied, DstlError, Invalid, brief
from dstl.rpc.codec import CALL, Call, Message, decode_message, encode_message
from dstl.rpc.handshake import Refusal, Role, ServerHandshake, is_vouched_for, socket_address
from dstl.rpc.protocol import (
    BEAT,
    BEAT_S,
    MAX_HANDSHAKE,
    PREFIX_BYTES,
    Framing,
    Secret,
    error_reply,
    frame_length,
    set_tcp_options,
)
from dstl.runtime import end_tasks, few_turns
from dstl.system_limits import open_file_limit

_log = logging.getLogger(__name__)

_MOST_CONNECTIONS = 4096  # above any fleet that one driver serves; each connection may buffer 1 MiB
_QUEUE = 128
"""So many wait in the kernel to be accepted; more of them try again a second later."""
_QUIET_S = 30.0
"""Refused strangers are logged once in so many seconds, with their number."""

Handler = Callable[["Peer", Any], Awaitable[Message]]
"""Takes a peer and its request, and returns the reply."""


class Peer:
    """One authenticated connection, as handlers see it.

    Attributes:
        role: In which capacity the peer has come; None before its handshake.
        framing: How its frames are written.
        on_lost: Called once, without arguments, when the connection ends; None until a handler sets it.
        end: Ends the connection, which is how the other side learns that it is not wanted any more. Idempotent.
    """

    def __init__(self, end: Callable[[], None] = lambda: None, reader: asyncio.StreamReader | None = None) -> None:
        self.role: Role | None = None
        self.framing = Framing()
        self.on_lost: Callable[[], None] | None = None
        self._is_lost = False
        self.end = end
        self._reader = reader

    @property
    def is_gone(self) -> bool:
        """True once the connection has ended, also while one of its calls is being handled."""
        reader = self._reader
        # The transport reads ahead of whoever asks the reader, so an end is noticed although nobody does.
        return self._is_lost or (reader is not None and (reader.at_eof() or reader.exception() is not None))

    def lose(self) -> None:
        """The connection has ended."""
        self._is_lost = True
        if self.on_lost is not None:
            self.on_lost()


class RpcServer:
    """Serves calls on a unix socket, a TCP port, or both. One event loop; not thread-safe.

    A hostile or broken peer costs its own connection, never another's: frames are bounded before they are read,
    no call is dispatched before the handshake, and the number of connections is capped. Who has not shaken hands yet is
    a stranger: of many, those that have been silent for longest are let go, so that those who know the secret, and need
    milliseconds, get in beside any number of others.

    Args:
        secret: Who does not know it is refused.
        handlers: By the call's class. One connection's calls are handled one after the other.
        max_connections: Beyond it, a peer is told to try later. None: half of the files that this process may open.
        max_strangers: Beyond it, a stranger has ``patience_s`` instead of ``handshake_s``.
        handshake_s: Seconds that a peer has for its handshake.
        patience_s: Seconds that a stranger has in any case.
    """

    def __init__(
        self,
        secret: Secret,
        handlers: Mapping[type[Call[Any]], Handler],
        *,
        max_connections: int | None = None,
        max_strangers: int = 64,
        handshake_s: float = 10.0,
        patience_s: float = 1.0,
    ) -> None:
        self._secret = secret
        self._handlers = {kind.name: (kind, handler) for kind, handler in handlers.items()}
        self._max_connections = _affordable_connections() if max_connections is None else max_connections
        # So many are accepted in one turn of the loop. Some seven turns pass until one that is let go has closed its
        # file, and in that time nothing asks whether there is room for more.
        self._accepted_at_once = max(1, min(64, self._max_connections // 16 - 1))
        self._max_strangers = max_strangers
        self._handshake_s = handshake_s
        self._patience_s = patience_s
        self._names: dict[bool, set[str]] = {True: set(), False: set()}  # of unix sockets, and of ports
        self._closed = False
        self._servers: list[asyncio.Server] = []
        self._connections: dict[asyncio.Task[None], None] = {}  # in order, so that a simulation ends them in the same
        self._strangers: dict[asyncio.Task[None], float] = {}  # when each has come: the first has waited for longest
        self._busy: dict[asyncio.StreamWriter, Framing] = {}  # connections with a call under way
        self._beats: asyncio.TimerHandle | None = None
        self._unsaid = 0
        self._quiet_until = float("-inf")

    async def listen_unix(self, path: str) -> None:
        """Listen on a unix socket; its directory must already be private (0700).

        Raises:
            Invalid: The path is longer than a socket address can hold (107 bytes).
        """
        if len(os.fsencode(path)) > 107:
            raise Invalid(f"the socket path {path!r} is too long: set a shorter TMPDIR")
        server = await asyncio.start_unix_server(self._accept, path, limit=1 << 20, backlog=self._accepted_at_once)
        _widen_queue(server)
        os.chmod(path, 0o600)
        self._names[True].add(path)
        self._servers.append(server)

    async def listen_tcp(self, host: str, port: int = 0, known_as: str = "") -> int:
        """Listen on one address and return the port.

        Args:
            host: The address to bind.
            port: 0 for any.
            known_as: The host by which others reach this one, where it is not ``host``: they are asked what they have
                dialled. The addresses of its sockets need not be named.

        Raises:
            Invalid: This host does not have the address, or another process has the port.
        """
        try:
            server = await asyncio.start_server(self._accept, host, port, limit=1 << 20, backlog=self._accepted_at_once)
        except OSError as error:
            raise Invalid(
                f"the DSTL process of {known_as or host} cannot listen at {host}:{port} ({error.strerror}): "
                "spark.driver.bindAddress, cluster.host and dstl taskmanager --host must be addresses of their own "
                "hosts, and cluster.port must be free: 0 takes any that is"
            ) from None
        _widen_queue(server)
        self._servers.append(server)
        port = int(server.sockets[0].getsockname()[1])
        self._names[False].update({f"{host}:{port}", f"{known_as or host}:{port}"})
        return port

    async def close(self) -> None:
        """Stop listening and end every connection. Idempotent."""
        self._closed = True
        if sum(_stops_accepting(server) for server in self._servers):
            # A server that is closed while a connection is being made of what it has accepted leaves its socket open.
            await few_turns()
        for server in self._servers:
            server.close()
        await end_tasks(self._connections)
        if self._beats is not None:
            self._beats.cancel()
        # They listen no more. From Python 3.12 on, wait_closed() also waits for peers, one of which may hang.
        self._servers.clear()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections[task] = None
        self._strangers[task] = asyncio.get_running_loop().time()
        peer = Peer(writer.close, reader)
        try:
            if self._closed:  # accepted just before, and unknown to close()
                return
            self._make_room()
            await self._admit(peer, reader, writer)
            self._strangers.pop(task, None)
            await self._serve(peer, reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError, TimeoutError):
            pass
        except asyncio.CancelledError:
            # Only close() and _make_room() cancel a connection; swallowing it here ends the task quietly.
            pass
        except Exception as error:
            if peer.role is None:
                self._note_stranger(error)
            elif isinstance(error, DstlError):
                _log.warning("a connection was ended: %s", error)
            else:
                _log.exception("a connection was ended")
        finally:
            self._connections.pop(task, None)
            self._strangers.pop(task, None)
            writer.close()
            peer.lose()

    def _make_room(self) -> None:
        """End strangers that have been silent for longest: beyond their number when they have had their time, and any
        beyond the number of all connections."""
        now = asyncio.get_running_loop().time()
        current = asyncio.current_task()
        over = len(self._connections) - self._max_connections
        for task, since in list(self._strangers.items()):
            if task is current or (
                over <= 0 and (len(self._strangers) <= self._max_strangers or now - since < self._patience_s)
            ):
                break
            del self._strangers[task]
            self._connections.pop(task, None)
            over -= 1
            task.cancel()

    def _note_stranger(self, error: Exception) -> None:
        """Log why a peer was not let in; where many are, now and then one."""
        self._unsaid += 1
        now = asyncio.get_running_loop().time()
        if now >= self._quiet_until:
            others = f" (and {self._unsaid - 1} others since the last such line)" if self._unsaid > 1 else ""
            _log.warning("a connection was refused: %s%s", error, others)
            self._unsaid, self._quiet_until = 0, now + _QUIET_S

    async def _admit(self, peer: Peer, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Let a peer in, or tell it why not and raise."""
        async with asyncio.timeout(self._handshake_s):
            try:
                if len(self._connections) > self._max_connections:
                    raise Refusal("busy", f"there are {self._max_connections} connections already")
                await self._handshake(peer, reader, writer)
            except DstlError as error:
                told = error if isinstance(error, Refusal) else Refusal("malformed", "")
                writer.writelines(Framing().encode(told.to_wire()))
                await writer.drain()
                raise

    async def _handshake(self, peer: Peer, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        sock = writer.get_extra_info("socket")
        set_tcp_options(sock)
        vouched = is_vouched_for(sock)
        own = socket_address(writer.get_extra_info("sockname"))
        names = self._names[sock.family == socket.AF_UNIX]
        handshake = ServerHandshake(self._secret, frozenset(names), own)
        plain = Framing()
        writer.writelines(plain.encode(handshake.challenge()))
        await writer.drain()
        length = frame_length(await reader.readexactly(PREFIX_BYTES), MAX_HANDSHAKE)
        answer, _ = plain.decode(await reader.readexactly(length))
        role, last, framing = handshake.accept(answer, vouched=vouched)
        writer.writelines(plain.encode(last))
        await writer.drain()
        peer.role, peer.framing = role, framing

    async def _serve(self, peer: Peer, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            length = frame_length(await reader.readexactly(PREFIX_BYTES))
            body = await reader.readexactly(length)
            # Also while a long MAC waits for a thread. Nothing is awaited between the reply's number and its sending.
            self._busy[writer] = peer.framing
            if self._beats is None:
                self._beats = asyncio.get_running_loop().call_later(BEAT_S, self._beat)
            try:
                header, payload = await peer.framing.decode_async(body)
                frame = await self._answer(peer, header.pop(CALL, None), header, payload)
            finally:
                del self._busy[writer]
            writer.writelines(frame)
            await writer.drain()

    def _beat(self) -> None:
        """Tell every caller whose call is under way that it is; by one timer, for most calls take far less time."""
        # First, so that one connection which cannot be written to takes no sign of life from the others for good.
        self._beats = asyncio.get_running_loop().call_later(BEAT_S, self._beat) if self._busy else None
        for writer, framing in self._busy.items():
            if not writer.is_closing():
                writer.writelines(framing.encode({BEAT: True}))

    async def _answer(
        self, peer: Peer, name: object, header: dict[str, Any], payload: memoryview
    ) -> list[bytes | memoryview]:
        try:
            reply = await self._dispatch(peer, name, header, payload)
            return await peer.framing.encode_async(*encode_message(reply))
        except Exception as error:
            if not isinstance(error, DstlError):
                _log.exception("the call %r failed", name)
            return peer.framing.encode(error_reply(error))

    async def _dispatch(self, peer: Peer, name: object, header: dict[str, Any], payload: memoryview) -> Message:
        kind, handler = self._handlers.get(name, (None, None)) if isinstance(name, str) else (None, None)
        if kind is None or handler is None:
            raise Invalid(f"no such call: {brief(name)}; do both sides run the same version of DSTL?")
        if kind.role not in (None, peer.role):
            raise AccessDenied(f"a {peer.role} may not call {name}")
        return await handler(peer, decode_message(kind, header, payload))


def _widen_queue(server: asyncio.Server) -> None:
    """Let more wait in the kernel than are accepted at once: asyncio has one number for both."""
    for each in server.sockets:
        if (number := each.fileno()) >= 0:  # else a simulated one's, which has no queue
            with socket.fromfd(number, each.family, each.type) as same:
                same.listen(_QUEUE)


def _stops_accepting(server: asyncio.Server) -> int:
    """Accept nobody any more; return how many sockets have accepted until now, of which a simulated server has none."""
    loop = asyncio.get_running_loop()
    return sum(loop.remove_reader(number) for each in server.sockets if (number := each.fileno()) >= 0)


def _affordable_connections() -> int:
    """Return half of the files that this process may open: stores, tables and peers need the others."""
    return max(16, min(_MOST_CONNECTIONS, open_file_limit() // 2))
