"""The calling side of a socket: blocking for a Spark worker, asynchronous for the coordinator."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from dataclasses import dataclass
from typing import Any

from dstl.errors import Closed, CorruptData, Invalid, Unavailable
from dstl.taskmanager.protocol import (
    MAX_FRAME,
    MAX_HANDSHAKE,
    NONCE_BYTES,
    PREFIX_BYTES,
    PROTOCOL_VERSION,
    Secret,
    decode_body,
    encode_frame,
    frame_length,
    new_nonce,
    proof,
    raise_for,
    set_tcp_options,
    verify_proof,
)

__all__ = ["Address", "AsyncConnection", "Connection"]

_OPEN_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class Address:
    """Where a service listens: a unix socket for the same host, a TCP address for others.

    Attributes:
        host: Host that the service runs on.
        port: TCP port; 0 when it listens on its unix socket only.
        path: Unix socket path on that host; empty when it has none.
    """

    host: str
    port: int = 0
    path: str = ""

    def to_wire(self) -> list[object]:
        """Return a plain list for a socket."""
        return [self.host, self.port, self.path]

    @staticmethod
    def from_wire(fields: list[Any]) -> Address:
        """Rebuild an address; the inverse of :meth:`to_wire`."""
        return Address(str(fields[0]), int(fields[1]), str(fields[2]))

    def seen_from(self, host: str) -> Address:
        """Return what a process on this host calls: two hosts may share a file system, as two on one machine do."""
        return self if host == self.host else Address(self.host, self.port)

    @property
    def is_local(self) -> bool:
        """True where the unix socket can be reached from this process."""
        return bool(self.path) and os.path.exists(self.path)

    @staticmethod
    def parse(text: str) -> Address:
        """Return the TCP address ``HOST:PORT``; an IPv6 host may stand in brackets.

        Raises:
            Invalid: It is not of that form.
        """
        host, _, port = text.rpartition(":")
        if not host or not port.isascii() or not port.isdigit() or int(port) > 65535:
            raise Invalid(f"not an address: {text!r}; write HOST:PORT")
        return Address(host.removeprefix("[").removesuffix("]"), int(port))

    def __str__(self) -> str:
        return self.path or f"{self.host}:{self.port}"


def _answer_challenge(secret: Secret, challenge: dict[str, Any], where: Address) -> tuple[bytes, bytes, bytes]:
    raise_for(challenge)
    server_nonce = challenge.get("nonce")
    if not isinstance(server_nonce, bytes) or len(server_nonce) != NONCE_BYTES:
        raise CorruptData(f"what listens at {where} is not a DSTL service")
    if challenge.get("version") != PROTOCOL_VERSION:
        raise Invalid(
            f"the service at {where} speaks protocol {challenge.get('version')}, this process {PROTOCOL_VERSION}: "
            "run the same version of DSTL on both sides"
        )
    client_nonce = new_nonce()
    return server_nonce, client_nonce, proof(secret, "client", server_nonce, client_nonce)


def _check_answer(secret: Secret, answer: dict[str, Any], server_nonce: bytes, client_nonce: bytes) -> None:
    raise_for(answer)
    verify_proof(secret, "server", server_nonce, client_nonce, answer.get("proof"))


class Connection:
    """A blocking connection of one worker to one service. Not thread-safe; make it after any fork.

    Attributes:
        pid: The process that made it; no other may use it.
        is_broken: True once a call has failed on the wire: make another connection.

    Args:
        timeout: Seconds of silence after which a call fails.

    Raises:
        Unavailable: Nobody listens there, or the connection broke.
        AccessDenied: One side does not know the other's secret.
        CorruptData: What listens there is not a DSTL service.
        Invalid: It is one of another version.
    """

    def __init__(self, address: Address, secret: Secret, *, timeout: float = 600.0) -> None:
        self.address = address
        self.pid = os.getpid()
        self.is_broken = False
        self._socket = _connect(address, timeout)
        try:
            challenge, _ = self._receive(MAX_HANDSHAKE)
            server_nonce, client_nonce, own = _answer_challenge(secret, challenge, address)
            self._send(encode_frame({"nonce": client_nonce, "proof": own}))
            answer, _ = self._receive(MAX_HANDSHAKE)
            _check_answer(secret, answer, server_nonce, client_nonce)
        except OSError as error:
            self._socket.close()
            raise Unavailable(f"the service at {address} ended the handshake: {error}") from error
        except BaseException:
            self._socket.close()
            raise

    def call(self, method: str, payload: bytes | memoryview = b"", **fields: Any) -> tuple[dict[str, Any], memoryview]:
        """Send a request, wait for its reply and return the reply's fields and payload.

        Raises:
            DstlError: Whatever the other side raised.
            Unavailable: The connection broke or timed out; it cannot be used any more.
            Invalid: The request is too long to be sent.
            Closed: Another process made the connection.
        """
        if os.getpid() != self.pid:
            raise Closed(f"the connection to {self.address} was made before a fork: make another one")
        frame = encode_frame({"call": method, **fields}, payload)
        try:
            self._send(frame)
            header, data = self._receive()
        except BaseException as error:
            # Whatever it is: a reply may still come, and would be taken for the next call's.
            self.is_broken = True
            self._socket.close()
            if isinstance(error, (OSError, CorruptData)):
                raise Unavailable(f"the connection to {self.address} broke during {method}: {error}") from error
            raise
        raise_for(header)
        return header, data

    def close(self) -> None:
        """Close the socket. Idempotent."""
        self._socket.close()

    def _send(self, frame: list[bytes | memoryview]) -> None:
        if len(frame[-1]) < 1 << 16:
            self._socket.sendall(b"".join(frame))
        else:
            for buffer in frame:
                self._socket.sendall(buffer)

    def _receive(self, limit: int = MAX_FRAME) -> tuple[dict[str, Any], memoryview]:
        return decode_body(self._exactly(frame_length(bytes(self._exactly(PREFIX_BYTES)), limit)))

    def _exactly(self, length: int) -> bytearray:
        buffer = bytearray(length)
        view, done = memoryview(buffer), 0
        while done < length:
            got = self._socket.recv_into(view[done:])
            if got == 0:
                raise ConnectionResetError("closed by the other side")
            done += got
        return buffer


def _connect(address: Address, timeout: float) -> socket.socket:
    try:
        if address.is_local:
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                sock.settimeout(timeout)
                sock.connect(address.path)
            except BaseException:
                sock.close()
                raise
            return sock
        sock = socket.create_connection((address.host, address.port), timeout)
        set_tcp_options(sock)
        return sock
    except OSError as error:
        raise Unavailable(f"nobody answers at {address}: {error}") from error


class AsyncConnection:
    """An asynchronous connection; calls on it are sent one after the other. One event loop."""

    def __init__(self, address: Address, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.address = address
        self._reader = reader
        self._writer = writer
        self._turn = asyncio.Lock()

    @property
    def is_broken(self) -> bool:
        """True once the connection has ended; it cannot be used any more."""
        return self._writer.is_closing()

    @staticmethod
    async def open(address: Address, secret: Secret, *, timeout: float = _OPEN_SECONDS) -> AsyncConnection:
        """Connect and authenticate, within ``timeout`` seconds.

        Raises:
            Unavailable: Nobody listens or answers there.
            AccessDenied: One side does not know the other's secret.
            CorruptData: What listens there is not a DSTL service.
            Invalid: It is one of another version.
        """
        try:
            async with asyncio.timeout(timeout):
                return await AsyncConnection._open(address, secret)
        except (OSError, asyncio.IncompleteReadError) as error:
            raise Unavailable(f"nobody answers at {address}: {error or 'timed out'}") from error

    @staticmethod
    async def _open(address: Address, secret: Secret) -> AsyncConnection:
        if address.is_local:
            reader, writer = await asyncio.open_unix_connection(address.path, limit=1 << 20)
        else:
            reader, writer = await asyncio.open_connection(address.host, address.port, limit=1 << 20)
        connection = AsyncConnection(address, reader, writer)
        try:
            set_tcp_options(writer.get_extra_info("socket"))
            challenge, _ = await connection._receive(MAX_HANDSHAKE)
            server_nonce, client_nonce, own = _answer_challenge(secret, challenge, address)
            writer.writelines(encode_frame({"nonce": client_nonce, "proof": own}))
            answer, _ = await connection._receive(MAX_HANDSHAKE)
            _check_answer(secret, answer, server_nonce, client_nonce)
        except BaseException:
            writer.close()
            raise
        return connection

    async def call(
        self, method: str, payload: bytes | memoryview = b"", **fields: Any
    ) -> tuple[dict[str, Any], memoryview]:
        """Send a request and return its reply's fields and payload.

        Raises:
            DstlError: Whatever the other side raised.
            Unavailable: The connection broke; it cannot be used any more. So it is when the call was cancelled.
            Invalid: The request is too long to be sent.
        """
        frame = encode_frame({"call": method, **fields}, payload)
        async with self._turn:
            try:
                if self.is_broken:
                    raise ConnectionResetError("it was closed before")
                self._writer.writelines(frame)
                await self._writer.drain()
                header, data = await self._receive()
            except BaseException as error:
                # Whatever it is: a reply may still come, and would be taken for the next call's.
                self._writer.close()
                if isinstance(error, (OSError, asyncio.IncompleteReadError, CorruptData)):
                    raise Unavailable(f"the connection to {self.address} broke during {method}: {error}") from error
                raise
        raise_for(header)
        return header, data

    async def wait_closed_by_peer(self) -> None:
        """Return when the other side has ended the connection; for a connection that is only a sign of life."""
        with contextlib.suppress(OSError):
            while await self._reader.read(1024):
                pass

    def close(self) -> None:
        """Close the socket. Idempotent."""
        self._writer.close()

    async def _receive(self, limit: int = MAX_FRAME) -> tuple[dict[str, Any], memoryview]:
        length = frame_length(await self._reader.readexactly(PREFIX_BYTES), limit)
        return decode_body(await self._reader.readexactly(length))
