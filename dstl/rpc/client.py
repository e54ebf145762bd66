"""A blocking connection, over which a Spark worker calls a service."""

from __future__ import annotations

import os
import socket
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, NoReturn, Protocol, TypeVar

from dstl.errors import Closed, CorruptData, Invalid, Unavailable
from dstl.rpc.codec import Call, R, decode_message, encode_message, reply_of
from dstl.rpc.frame_socket import FrameSocket
from dstl.rpc.handshake import ClientHandshake, Role, is_vouched_for, no_service, socket_address
from dstl.rpc.protocol import (
    BEAT,
    MAX_FRAME,
    MAX_HANDSHAKE,
    Framing,
    Secret,
    raise_for,
    set_tcp_options,
)
from dstl.rpc.silence import SILENCE_S, no_sign_of_life
from dstl.runtime import Clock, SystemClock

MAX_IN_FLIGHT = 32
"""Most requests of a blocking connection whose replies were not read yet."""
OPEN_SECONDS = 30.0
"""What a process has for connecting and for the handshake, however long its calls may take then."""


@dataclass(frozen=True, slots=True)
class Address:
    """The place where a service listens: a unix socket for the same host, a TCP address for others.

    Attributes:
        host: Host that the service runs on.
        port: TCP port; 0 when it listens on its unix socket only.
        path: Unix socket path on that host; empty when it has none.
    """

    host: str
    port: int = 0
    path: str = ""

    def seen_from(self, host: str) -> Address:
        """Return what a process on this host calls: two hosts may share a file system, as two on one machine do."""
        return self if host == self.host else Address(self.host, self.port)

    @property
    def is_local(self) -> bool:
        """True where the unix socket can be reached from this process, and is its own user's."""
        try:
            return bool(self.path) and os.stat(self.path).st_uid == os.geteuid()
        except OSError:
            return False

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


R_co = TypeVar("R_co", covariant=True)


class Reply(Protocol[R_co]):
    """The reply to a request that was sent: a :class:`Pending`, or a simulated one."""

    @property
    def is_done(self) -> bool:
        """True once the reply is there, or will never be."""

    def result(self) -> R_co:
        """Return the reply, or raise its error; waits for it. Another call returns, or raises, the same."""


class Transport(Protocol):
    """A blocking connection as its caller sees it: :class:`Connection`, or a simulated one.

    Requests are handled in their order, one after the other.
    """

    def send(self, message: Call[R]) -> Reply[R]:
        """Send a request without waiting for its reply; see :meth:`Connection.send`."""


class Connection:
    """A blocking connection of one worker to one service. Not thread-safe; make it after any fork.

    Several requests may be sent before the first reply is read: see :meth:`send`.

    Attributes:
        pid: The process that made it; no other may use it.
        is_broken: True once a call has failed on the wire, or it was closed: make another connection.

    Args:
        timeout: Seconds of silence after which a call fails. A call may take as long as it likes: a service that is at
            it says so every ten seconds. The handshake has 30 seconds at most.
        clock: Bounds the handshake.
        dial: Connects a socket.

    Raises:
        Unavailable: Nothing listens there, it is not a DSTL service, or the connection broke.
        AccessDenied: One side does not know the other's secret, or the service is not the one that was dialled.
        Invalid: It is one of another version.
    """

    def __init__(
        self,
        address: Address,
        secret: Secret,
        *,
        timeout: float = SILENCE_S,
        clock: Clock | None = None,
        dial: Dial | None = None,
    ) -> None:
        self.address = address
        self.pid = os.getpid()
        self.is_broken = False
        self._framing = Framing()
        self._timeout = timeout
        self._waiting: deque[Pending[Any]] = deque()
        clock = clock if clock is not None else SystemClock()
        deadline = clock.now() + min(timeout, OPEN_SECONDS)
        try:
            sock = (dial or _dial)(address, min(timeout, OPEN_SECONDS))
        except (OSError, UnicodeError) as error:  # a name that cannot be one of a host is a UnicodeError
            raise Unavailable(f"nothing answers at {address}: {error}") from error
        self._frames = FrameSocket(sock, clock)
        self._frames.set_deadline(deadline)
        try:
            self._framing = self._handshake(sock, secret)
            self._frames.set_timeout(timeout)
        except BaseException as error:
            sock.close()
            if isinstance(error, CorruptData):
                raise no_service(str(address)) from error
            if isinstance(error, OSError):
                raise Unavailable(f"the service at {address} ended the handshake: {error}") from error
            raise

    @property
    def in_flight(self) -> int:
        """Number of requests that were sent and whose replies were not read yet."""
        return len(self._waiting)

    @property
    def is_idle(self) -> bool:
        """True where this process may use it for something new: nothing is under way, and neither side has ended it."""
        return not (self.is_broken or self.in_flight or self.pid != os.getpid() or self._frames.has_input)

    def _handshake(self, sock: socket.socket, secret: Secret) -> Framing:
        vouched = is_vouched_for(sock)
        dialled, reached = names_of(self.address, sock)
        handshake = ClientHandshake(secret, Role.WORKER, dialled, reached)
        challenge, _ = self._receive(MAX_HANDSHAKE)
        self._frames.send(self._framing.encode(handshake.answer(challenge)))
        handshake.check_version()
        answer, _ = self._receive(MAX_HANDSHAKE)
        return handshake.finish(answer, vouched=vouched)

    def send(self, message: Call[R]) -> Pending[R]:
        """Send a request and return its reply to come; waits while too many are in flight.

        Requests are handled in their order, one after the other, also behind one that fails.

        Raises:
            Unavailable: The connection broke or timed out; it cannot be used any more.
            Invalid: The request is too long to be sent.
            Closed: Another process made the connection.
        """
        if os.getpid() != self.pid:
            raise Closed(f"the connection to {self.address} was made before a fork: make another one")
        while len(self._waiting) >= MAX_IN_FLIGHT:
            self._take()
        pending = Pending(self, message)
        frame = None
        try:
            if self.is_broken:
                raise ConnectionResetError("it was closed before")
            frame = self._framing.encode(*encode_message(message))
            self._frames.send(frame, receiving=bool(self._waiting))
        except BaseException as error:
            if frame is None and isinstance(error, Invalid):
                raise  # nothing was sent, and nothing will come
            self._break(message.name, error)
        self._waiting.append(pending)
        return pending

    def close(self) -> None:
        """Close the socket. Idempotent."""
        self.is_broken = True
        self._frames.close()

    def _take(self) -> None:
        """Read the next reply, which is the one to the oldest request."""
        pending = self._waiting[0]
        try:
            answer = self._receive()
        except BaseException as error:
            self._break(pending.name, error)
        self._waiting.popleft()
        pending.answer = answer

    def _break(self, during: str, error: BaseException) -> NoReturn:
        """Give the connection up, whatever the error is: replies may still come, and would be taken for others'."""
        self.is_broken = True
        self._frames.close()
        why = no_sign_of_life(self._timeout) if isinstance(error, TimeoutError) else error
        what = f"the connection to {self.address} broke during {during}: {why}"
        for pending in self._waiting:
            pending.answer = Unavailable(what)
        self._waiting.clear()
        if isinstance(error, (OSError, CorruptData)):
            raise Unavailable(what) from error
        raise error

    def _receive(self, limit: int = MAX_FRAME) -> tuple[dict[str, Any], memoryview]:
        while True:
            header, data = self._framing.decode(self._frames.receive(limit))
            if BEAT not in header:
                return header, data


class Pending(Generic[R]):
    """The reply to a request that was sent: read when it is asked for, after those to the requests before it.

    Attributes:
        name: The call.
        answer: The reply's header and payload, or why none will come; None while it was not read.
    """

    __slots__ = ("_connection", "_kind", "answer", "name")

    def __init__(self, connection: Connection, message: Call[R]) -> None:
        self._connection = connection
        self._kind = reply_of(type(message))
        self.name = message.name
        self.answer: tuple[dict[str, Any], memoryview] | Unavailable | None = None

    @property
    def is_done(self) -> bool:
        """True once the reply was read, or will never be."""
        return self.answer is not None

    def result(self) -> R:
        """Return the reply; waits for it. Another call returns, or raises, the same.

        Raises:
            DstlError: Whatever the other side raised.
            Unavailable: The connection broke or timed out; it cannot be used any more.
            CorruptData: The reply is not one to this request.
        """
        while self.answer is None:
            self._connection._take()
        if isinstance(self.answer, Unavailable):
            raise self.answer
        header, data = self.answer
        raise_for(header)
        return decode_message(self._kind, header, data)


def names_of(address: Address, sock: socket.socket) -> tuple[str, str]:
    """Return a service's address as this process knows it, and as its connected socket does."""
    if sock.family == socket.AF_UNIX:
        return address.path, ""
    reached = socket_address(sock.getpeername()) if sock.family in (socket.AF_INET, socket.AF_INET6) else ""
    return f"{address.host}:{address.port}", reached


Dial = Callable[[Address, float], socket.socket]
"""Connects a socket to an address within so many seconds, or raises ``OSError``."""


def _dial(address: Address, timeout: float) -> socket.socket:
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
