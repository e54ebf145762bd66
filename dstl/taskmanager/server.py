"""The serving side of a socket: accept, authenticate, dispatch, bound."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable
from typing import Any

from dstl.errors import CorruptData, DstlError, Invalid, Unavailable
from dstl.taskmanager.protocol import (
    MAX_HANDSHAKE,
    NONCE_BYTES,
    PREFIX_BYTES,
    PROTOCOL_VERSION,
    Secret,
    decode_body,
    encode_frame,
    error_reply,
    frame_length,
    new_nonce,
    proof,
    set_tcp_options,
    verify_proof,
)

__all__ = ["Peer", "Reply", "RpcServer"]

_log = logging.getLogger(__name__)

Reply = tuple[dict[str, Any], bytes | memoryview]
Handler = Callable[["Peer", dict[str, Any], memoryview], Awaitable[Reply]]


class Peer:
    """One authenticated connection, as handlers see it.

    Attributes:
        on_lost: Called once, without arguments, when the connection ends; None until a handler sets it.
        is_gone: True once the connection has ended while one of its calls is being handled; only those that the
            server watches for find out.
    """

    def __init__(self, end: Callable[[], None] = lambda: None) -> None:
        self.on_lost: Callable[[], None] | None = None
        self.is_gone = False
        self._end = end

    def end(self) -> None:
        """End the connection, which is how the other side learns that it is not wanted any more. Idempotent."""
        self._end()


class RpcServer:
    """Serves named methods on a unix socket, a TCP port, or both. One event loop; not thread-safe.

    A hostile or broken peer costs its own connection, never another's: frames are bounded before they are read,
    nobody is dispatched before the handshake, and the number of connections is capped.

    Args:
        secret: Who does not know it is refused.
        handlers: By name of the call. One connection's calls are handled one after the other.
        max_connections: Beyond it, a peer is told to try later.
        handshake_s: Seconds that a peer has for its handshake.
        watched: Calls that may wait for long: their handlers are told by :attr:`Peer.is_gone` when nobody waits for the
            answer any more. It costs a call some microseconds.
    """

    def __init__(
        self,
        secret: Secret,
        handlers: dict[str, Handler],
        *,
        max_connections: int = 4096,
        handshake_s: float = 10.0,
        watched: frozenset[str] = frozenset(),
    ) -> None:
        self._secret = secret
        self._handlers = handlers
        self._max_connections = max_connections
        self._handshake_s = handshake_s
        self._watched = watched
        self._closed = False
        self._servers: list[asyncio.Server] = []
        self._connections: dict[asyncio.Task[None], None] = {}  # in order, so that a simulation ends them in the same

    async def listen_unix(self, path: str) -> None:
        """Listen on a unix socket; its directory must already be private (0700).

        Raises:
            Invalid: The path is longer than a socket address can hold (107 bytes).
        """
        if len(os.fsencode(path)) > 107:
            raise Invalid(f"the socket path {path!r} is too long: set a shorter TMPDIR")
        server = await asyncio.start_unix_server(self._accept, path, limit=1 << 20)
        os.chmod(path, 0o600)
        self._servers.append(server)

    async def listen_tcp(self, host: str, port: int = 0) -> int:
        """Listen on one address and return the port."""
        server = await asyncio.start_server(self._accept, host, port, limit=1 << 20)
        self._servers.append(server)
        return int(server.sockets[0].getsockname()[1])

    async def close(self) -> None:
        """Stop listening and end every connection. Idempotent."""
        self._closed = True
        for server in self._servers:
            server.close()
        for task in list(self._connections):
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)
        for server in self._servers:
            await server.wait_closed()
        self._servers.clear()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections[task] = None
        peer = Peer(writer.close)
        try:
            if self._closed:  # accepted just before, and unknown to close()
                return
            set_tcp_options(writer.get_extra_info("socket"))
            await self._admit(reader, writer)
            await self._serve(peer, reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError, TimeoutError):
            pass
        except asyncio.CancelledError:
            # Only close() cancels a connection; swallowing it here ends the task quietly.
            pass
        except DstlError as error:
            _log.warning("a connection was ended: %s", error)
        except Exception:
            _log.exception("a connection was ended")
        finally:
            self._connections.pop(task, None)
            writer.close()
            if peer.on_lost is not None:
                peer.on_lost()

    async def _admit(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Let a peer in, or tell it why not and raise."""
        async with asyncio.timeout(self._handshake_s):
            try:
                if len(self._connections) > self._max_connections:
                    raise Unavailable(f"there are {self._max_connections} connections already: try again later")
                await self._handshake(reader, writer)
            except DstlError as error:
                writer.writelines(encode_frame(error_reply(error)))
                await writer.drain()
                raise

    async def _handshake(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonce = new_nonce()
        writer.writelines(encode_frame({"version": PROTOCOL_VERSION, "nonce": nonce}))
        await writer.drain()
        length = frame_length(await reader.readexactly(PREFIX_BYTES), MAX_HANDSHAKE)
        header, _ = decode_body(await reader.readexactly(length))
        client_nonce = header.get("nonce")
        if not isinstance(client_nonce, bytes) or len(client_nonce) != NONCE_BYTES:
            raise CorruptData("a handshake without a nonce was refused")
        verify_proof(self._secret, "client", nonce, client_nonce, header.get("proof"))
        writer.writelines(encode_frame({"proof": proof(self._secret, "server", nonce, client_nonce)}))
        await writer.drain()

    async def _serve(self, peer: Peer, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        prefix = await reader.readexactly(PREFIX_BYTES)
        while True:
            header, payload = decode_body(await reader.readexactly(frame_length(prefix)))
            if header.get("call") in self._watched:
                prefix = await self._answer_watched(peer, header, payload, reader, writer)
            else:
                await self._answer(peer, header, payload, writer)
                prefix = await reader.readexactly(PREFIX_BYTES)

    async def _answer(
        self, peer: Peer, header: dict[str, Any], payload: memoryview, writer: asyncio.StreamWriter
    ) -> None:
        try:
            reply, data = await self._dispatch(peer, header, payload)
            frame = encode_frame(reply, data)
        except asyncio.CancelledError:
            raise
        except Exception as error:
            if not isinstance(error, DstlError):
                _log.exception("the call %r failed", header.get("call"))
            frame = encode_frame(error_reply(error))
        writer.writelines(frame)
        await writer.drain()

    async def _answer_watched(
        self,
        peer: Peer,
        header: dict[str, Any],
        payload: memoryview,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> bytes:
        """Answer a call while the next one's prefix is awaited, for only a read notices that the peer has gone.

        Returns:
            The prefix.
        """

        def note(ahead: asyncio.Task[bytes]) -> None:
            peer.is_gone = ahead.cancelled() or ahead.exception() is not None

        ahead = asyncio.ensure_future(reader.readexactly(PREFIX_BYTES))
        ahead.add_done_callback(note)
        try:
            await self._answer(peer, header, payload, writer)
            return await ahead
        finally:
            ahead.cancel()

    async def _dispatch(self, peer: Peer, header: dict[str, Any], payload: memoryview) -> Reply:
        handler = self._handlers.get(str(header.get("call")))
        if handler is None:
            raise Invalid(f"no such call: {header.get('call')!r}; do both sides run the same version of DSTL?")
        return await handler(peer, header, payload)
