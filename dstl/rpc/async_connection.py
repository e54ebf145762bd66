"""An asynchronous connection, over which processes with an event loop call services."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, NoReturn, TypeVar

from dstl.errors import CorruptData, Invalid, Unavailable
from dstl.rpc.client import OPEN_SECONDS, Address, names_of
from dstl.rpc.codec import Call, R, decode_message, encode_message, reply_of
from dstl.rpc.frame_socket import CLOSED
from dstl.rpc.handshake import ClientHandshake, Role, is_vouched_for, no_service
from dstl.rpc.protocol import (
    BEAT,
    MAX_FRAME,
    MAX_HANDSHAKE,
    PREFIX_BYTES,
    Framing,
    Secret,
    frame_length,
    raise_for,
    set_tcp_options,
)
from dstl.rpc.silence import SILENCE_S, Silence, no_sign_of_life

_T = TypeVar("_T")


class AsyncConnection:
    """An asynchronous connection. One event loop.

    Several calls may wait for their replies at once: requests go out in the order of the calls, and are handled in it.
    """

    def __init__(self, address: Address, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.address = address
        self._reader = reader
        self._writer = writer
        # Who waits longest for a lock has it next, so replies are read in the order in which requests were sent.
        self._sending = asyncio.Lock()
        self._receiving = asyncio.Lock()
        self._is_given_up = False
        self._framing = Framing()
        self._steps = 0

    @property
    def is_broken(self) -> bool:
        """True once the connection has ended; it cannot be used any more."""
        return self._writer.is_closing()

    @staticmethod
    async def open(
        address: Address, secret: Secret, *, timeout: float = OPEN_SECONDS, role: Role = Role.WORKER
    ) -> AsyncConnection:
        """Connect and authenticate, within ``timeout`` seconds.

        Args:
            address: Where the service listens.
            secret: The application's.
            timeout: For both together.
            role: In which capacity this process calls.

        Raises:
            Unavailable: Nothing listens or answers there, or it is not a DSTL service.
            AccessDenied: One side does not know the other's secret, or the service is not the one that was dialled.
            Invalid: It is one of another version.
        """
        try:
            async with asyncio.timeout(timeout):
                return await AsyncConnection._open(address, secret, role)
        except CorruptData as error:
            raise no_service(str(address)) from error
        except (OSError, UnicodeError, asyncio.IncompleteReadError) as error:
            raise Unavailable(f"nothing answers at {address}: {error or 'timed out'}") from error

    @staticmethod
    async def _open(address: Address, secret: Secret, role: Role) -> AsyncConnection:
        if address.is_local:
            reader, writer = await asyncio.open_unix_connection(address.path, limit=1 << 20)
        else:
            reader, writer = await asyncio.open_connection(address.host, address.port, limit=1 << 20)
        connection = AsyncConnection(address, reader, writer)
        try:
            sock = writer.get_extra_info("socket")
            set_tcp_options(sock)
            vouched = is_vouched_for(sock)
            handshake = ClientHandshake(secret, role, *names_of(address, sock))
            challenge, _ = await connection._receive(MAX_HANDSHAKE)
            writer.writelines(connection._framing.encode(handshake.answer(challenge)))
            handshake.check_version()
            answer, _ = await connection._receive(MAX_HANDSHAKE)
            connection._framing = handshake.finish(answer, vouched=vouched)
        except BaseException:
            writer.close()
            raise
        return connection

    async def call(self, message: Call[R]) -> R:
        """Send a request and return its reply.

        Raises:
            DstlError: Whatever the other side raised.
            Unavailable: The connection broke, or the service was silent for :data:`~dstl.rpc.silence.SILENCE_S`; it
                cannot be used any more. So it is for all whose replies are still to come when a call was cancelled.
            Invalid: The request is too long to be sent.
            CorruptData: The reply is not one to this request.
        """
        async with self._sending:
            frame = None
            try:
                if self.is_broken:
                    raise ConnectionResetError("it was closed before")
                frame = await self._framing.encode_async(*encode_message(message))
                self._writer.writelines(frame)
                if self._writer.transport.get_write_buffer_size():
                    await self._step(self._writer.drain)
            except BaseException as error:
                if frame is None and isinstance(error, Invalid):
                    raise  # nothing was sent, and nothing will come
                self._break(message.name, error)
        try:
            async with self._receiving:
                if self._is_given_up:
                    raise ConnectionResetError("a call before it was given up")
                header, data = await self._receive()
        except BaseException as error:
            self._break(message.name, error)
        raise_for(header)
        return decode_message(reply_of(type(message)), header, data)

    def _break(self, during: str, error: BaseException) -> NoReturn:
        """Give the connection up, whatever the error is: replies may still come, and would be taken for others'."""
        self._is_given_up = True
        # Not closed: that would wait for who does not read to take what is still to be sent; so would other senders.
        self._writer.transport.abort()
        if isinstance(error, (OSError, asyncio.IncompleteReadError, CorruptData)):
            why = CLOSED if isinstance(error, asyncio.IncompleteReadError) else error
            raise Unavailable(f"the connection to {self.address} broke during {during}: {why}") from error
        raise error

    async def wait_closed_by_peer(self) -> None:
        """Return when the other side has ended the connection; for a connection that is only a sign of life."""
        with contextlib.suppress(OSError):
            while await self._reader.read(1024):
                pass

    async def wait_closed(self) -> None:
        """Return when it was closed, or a call has found it broken."""
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()

    def close(self) -> None:
        """Close the socket. Idempotent."""
        self._writer.close()

    async def _receive(self, limit: int = MAX_FRAME) -> tuple[dict[str, Any], memoryview]:
        while True:
            prefix = await self._read(PREFIX_BYTES)
            body = await self._read(frame_length(prefix, limit))
            header, data = await self._framing.decode_async(body)
            if BEAT not in header:
                return header, data

    async def _read(self, length: int) -> bytes:
        parts: list[bytes] = []
        while length:
            part = await self._step(partial(self._reader.read, length))
            if not part:
                raise asyncio.IncompleteReadError(b"".join(parts), None)
            parts.append(part)
            length -= len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    async def _step(self, step: Callable[[], Coroutine[Any, Any, _T]]) -> _T:
        """Await one step of sending or receiving, as long as either comes on.

        Raises:
            TimeoutError: Neither has for :data:`~dstl.rpc.silence.SILENCE_S`.
        """
        silence = Silence(SILENCE_S, self._progress)
        while True:
            try:
                async with asyncio.timeout(silence.look_s) as look:
                    done = await step()
                self._steps += 1
                return done
            except TimeoutError:
                if not look.expired():
                    raise
            if silence.look():
                raise TimeoutError(no_sign_of_life(SILENCE_S))

    def _progress(self) -> tuple[int, int]:
        return self._steps, self._writer.transport.get_write_buffer_size()
