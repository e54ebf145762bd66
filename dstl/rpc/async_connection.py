"""An asynchronous connection, over which processes with an event loop call services."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any, NoReturn

from dstl.errors import CorruptData, Invalid, Unavailable
from dstl.rpc.client import OPEN_SECONDS, Address, names_of, silence
from dstl.rpc.codec import Call, R, decode_reply, encode_call, reply_of
from dstl.rpc.frame_socket import CLOSED
from dstl.rpc.handshake import ClientHandshake, Role, is_vouched_for, no_service
from dstl.rpc.protocol import (
    BEAT,
    MAX_FRAME,
    MAX_HANDSHAKE,
    PREFIX_BYTES,
    SILENCE_S,
    Framing,
    Secret,
    frame_length,
    raise_for,
    set_tcp_options,
)

_SLOWEST_BYTES_S = 1 << 20
"""A frame that comes more slowly than that, and takes as long as silence beside, comes from a process that hangs."""
_ASLEEP_S = 1.0
"""A timer that is later than that was of a process that stood still itself: it has not read yet what came meanwhile."""


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
            Unavailable: The connection broke, or the service was silent for :data:`~dstl.rpc.protocol.SILENCE_S`; it
                cannot be used any more. So it is for all whose replies are still to come when a call was cancelled.
            Invalid: The request is too long to be sent.
            CorruptData: The reply is not one to this request.
        """
        async with self._sending:
            frame = None
            try:
                if self.is_broken:
                    raise ConnectionResetError("it was closed before")
                frame = await self._framing.encode_async(*encode_call(message))
                self._writer.writelines(frame)
                await self._writer.drain()
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
        return decode_reply(reply_of(type(message)), header, data)

    def _break(self, during: str, error: BaseException) -> NoReturn:
        """Give the connection up, whatever the error is: replies may still come, and would be taken for others'."""
        self._is_given_up = True
        self._writer.close()
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
        now = asyncio.get_running_loop().time
        while True:
            due = now() + SILENCE_S + length / _SLOWEST_BYTES_S
            try:
                async with asyncio.timeout_at(due) as limit:
                    return await self._reader.readexactly(length)
            except TimeoutError:
                if not limit.expired():
                    raise
                if now() < due + _ASLEEP_S:
                    raise TimeoutError(silence(SILENCE_S)) from None
