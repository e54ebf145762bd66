"""Secret and frames of every socket between drivers, TaskManagers and workers.

A frame is ``u32 body length | u32 header length | header (msgpack map) | payload (raw bytes) | MAC``, big-endian; the
body is everything behind its length. A request names its method; a reply holds either ``ok`` fields or an ``error``
pair. While a service is at a request it says so now and then, by a frame of :data:`BEAT` alone: so its caller knows a
long call from a process that hangs. Nothing is ever unpickled. Whether there is a MAC is the connection's business
(:class:`Framing`); the frames of a handshake (``dstl.rpc.handshake``) have none, and are not longer than
:data:`MAX_HANDSHAKE`.

A MAC stands at the end of a frame's body and covers the length field, the body and the frame's number in its direction,
under a key that is of this connection and direction alone. So a frame that was changed, left out, repeated, sent back
or taken over from another connection is found out before anything of it is read. It is keyed BLAKE2b of 16 bytes:
0.8 us for a small frame and 1.4 ms per MB, where HMAC-SHA256 takes 3.6 us and, by the processor's own instructions, as
long per MB.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import secrets
import socket
import struct
from collections.abc import Callable
from itertools import count
from typing import Any

import msgpack

from dstl.errors import CorruptData, Invalid, error_from_wire, error_to_wire
from dstl.private_file import check_strength, read_private_file

PROTOCOL_VERSION = 12
"""Grows with every change of a message, a frame or the handshake: both sides must have the same."""
MAX_FRAME = 256 << 20
"""No frame is longer, in bytes: a bigger length is refused before anything is allocated."""
MAX_HANDSHAKE = 1024
"""No frame of a handshake is longer, in bytes: an unauthenticated peer cannot make this side allocate."""
PREFIX_BYTES = 4  # a length of 32 bits
BEAT = "working"
"""The header field of a frame that comes before a reply: the service is at the request."""
BEAT_S = 10.0
"""How often a service says so (Flink ``heartbeat.interval``)."""
_MAX_HEADER = 16 << 20  # lists of some hundred thousand files, the longest there are; keys and values are payload
_MAX_CONTAINERS = 1 << 18
"""Lists and maps in a header, or payload: a byte each in the frame, up to a hundred in memory. A list of files has one
for each."""
_KEEPALIVE = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3}


class Secret:
    """A shared key that never shows itself: not in a repr, a log line or an error.

    It may be pickled into the closure of a Spark task; Spark ships closures as opaque bytes.
    """

    __slots__ = ("_key",)

    def __init__(self, key: bytes) -> None:
        if len(key) < 16:
            raise Invalid("the application's secret must have at least 16 bytes")
        self._key = key

    def __repr__(self) -> str:
        return "Secret(***)"

    def reveal(self) -> bytes:
        """Return the key: for the handshake and for handing it to a child process over a pipe."""
        return self._key

    @staticmethod
    def generate() -> Secret:
        """Return a new random secret of 32 bytes."""
        return Secret(secrets.token_bytes(32))

    @staticmethod
    def from_text(text: str) -> Secret:
        """Return the secret that people write: white space around it does not count.

        Raises:
            Invalid: It is shorter than 16 bytes, not text, or easily guessed.
        """
        try:
            key = text.strip().encode()
        except UnicodeError:
            raise Invalid("the application's secret is not UTF-8 text: write it in letters and digits") from None
        secret = Secret(key)
        check_strength(key, "the application's secret")
        return secret

    @staticmethod
    def from_file(path: str) -> Secret:
        """Return the secret that a file holds as text.

        Raises:
            Invalid: It cannot be read, or others than its owner may, or the secret is too short.
        """
        return Secret.from_text(read_private_file(path, "secret"))


def encode_frame(
    header: dict[str, Any], payload: bytes | memoryview = b"", trailer: int = 0
) -> list[bytes | memoryview]:
    """Return the buffers of one frame, to be written in order; so many bytes of its body are still to follow them.

    Raises:
        Invalid: The frame would be longer than :data:`MAX_FRAME`.
    """
    packed = msgpack.packb(header, use_bin_type=True)
    body = 4 + len(packed) + len(payload) + trailer
    if body > MAX_FRAME:
        raise Invalid(f"a message of {body} bytes is above the limit of {MAX_FRAME}: send it in parts")
    front = [struct.pack(">II", body, len(packed)), packed]
    # From Python 3.12 on, asyncio's writelines() never gets rid of an empty buffer at its end, and polls for ever.
    return [*front, payload] if len(payload) else front


def frame_length(prefix: bytes, limit: int = MAX_FRAME) -> int:
    """Return the body length that a frame's first :data:`PREFIX_BYTES` bytes declare.

    Raises:
        CorruptData: It is out of bounds; the connection must be closed.
    """
    (length,) = struct.unpack(">I", prefix)
    if not 4 <= length <= limit:
        raise CorruptData(f"a frame declares {length} bytes; the limit is {limit}")
    return int(length)


def decode_body(body: bytes | bytearray | memoryview) -> tuple[dict[str, Any], memoryview]:
    """Split a frame's body into header and payload.

    Raises:
        CorruptData: It is not a frame of ours.
    """
    view = memoryview(body)
    if len(view) < 4:
        raise CorruptData(f"a frame has a body of {len(view)} bytes")
    (length,) = struct.unpack(">I", view[:4])
    if length > min(_MAX_HEADER, len(view) - 4):
        raise CorruptData(f"a frame declares a header of {length} bytes in a body of {len(view)}")
    try:
        header = unpack(view[4 : 4 + length])
    except ValueError as error:
        raise CorruptData(f"a frame's header is {error}") from None
    if not isinstance(header, dict):
        raise CorruptData("a frame's header is not a map")
    return header, view[4 + length :]


def unpack(packed: memoryview) -> Any:
    """Return the plain data that msgpack bytes hold.

    Raises:
        ValueError: They hold none, or more lists and maps than memory should be spent on.
    """
    try:
        note = _counted() if len(packed) > _MAX_CONTAINERS else None
        return msgpack.unpackb(packed, raw=False, strict_map_key=False, list_hook=note, object_hook=note)
    except (ValueError, TypeError, RecursionError, msgpack.exceptions.UnpackException) as error:
        # A TypeError: a map under a key that cannot be one.
        raise ValueError(f"not msgpack: {error}") from None


def _counted() -> Callable[[Any], Any]:
    """Return what takes each list or map as it is, and refuses too many."""
    numbers = count()

    def note(value: Any) -> Any:
        if next(numbers) >= _MAX_CONTAINERS:
            raise ValueError(f"more than {_MAX_CONTAINERS} lists and maps")
        return value

    return note


def error_reply(error: BaseException) -> dict[str, Any]:
    """Return the header of a reply that raises ``error`` again at the caller's side."""
    return {"error": list(error_to_wire(error))}


def raise_for(header: dict[str, Any]) -> None:
    """Raise the error that a reply carries, if it carries one."""
    match header.get("error"):
        case None:
            return
        case [str(kind), str(message)]:
            raise error_from_wire(kind, message)
    raise CorruptData("a reply's error is malformed")


def set_tcp_options(sock: socket.socket) -> None:
    """Send small frames at once, and notice within about a minute that the other host has gone without a word.

    Does nothing to a unix socket.
    """
    if sock.family not in (socket.AF_INET, socket.AF_INET6):
        return
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE.items():
        if hasattr(socket, name):  # macOS names one of them differently, and has a default
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


MAC_BYTES = 16  # 128 bits: cannot be guessed while a connection lasts
_LARGE = 1 << 20
"""A MAC over more bytes is made in a thread: the loop has other peers meanwhile."""


class FrameMac:
    """The MACs of one direction of one connection, in the order of its frames. Not thread-safe.

    Args:
        key: Of this direction of this connection alone, up to 64 bytes.
    """

    def __init__(self, key: bytes) -> None:
        self._keyed = hashlib.blake2b(key=key, digest_size=MAC_BYTES)
        self._count = 0

    def next(self, *buffers: bytes | memoryview) -> bytes:
        """Return the MAC of the next frame, given as its buffers without the MAC."""
        return self.finish(self.start(*buffers))

    def start(self, *buffers: bytes | memoryview) -> hashlib.blake2b:
        """Return what :meth:`finish` goes on with, of a frame whose number is not known yet. Thread-safe."""
        mac = self._keyed.copy()
        for buffer in buffers:
            mac.update(buffer)
        return mac

    def finish(self, mac: hashlib.blake2b) -> bytes:
        """Return the MAC of the frame, which is the next one."""
        mac.update(struct.pack(">Q", self._count))
        self._count += 1
        return mac.digest()


class Framing:
    """The frames of one connection. Not thread-safe; one caller at a time for each direction.

    Args:
        sent: MACs of what this side sends; None for none.
        received: MACs of what the other side sends; None for none.
    """

    def __init__(self, sent: FrameMac | None = None, received: FrameMac | None = None) -> None:
        self._sent = sent
        self._received = received

    def encode(self, header: dict[str, Any], payload: bytes | memoryview = b"") -> list[bytes | memoryview]:
        """Return the buffers of the next frame to send, which must be sent: its number is used.

        Raises:
            Invalid: It would be too long; it has used no number.
        """
        if self._sent is None:
            return encode_frame(header, payload)
        frame = encode_frame(header, payload, MAC_BYTES)
        return [*frame, self._sent.next(*frame)]

    def decode(self, body: bytes | bytearray | memoryview) -> tuple[dict[str, Any], memoryview]:
        """Split the body of the next frame that has come into header and payload.

        Raises:
            CorruptData: It is not the frame that the other side sent next; the connection must be closed.
        """
        if self._received is None:
            return decode_body(body)
        view = memoryview(body)
        told, mac = view[:-MAC_BYTES], view[-MAC_BYTES:]
        if len(mac) < MAC_BYTES or not hmac.compare_digest(
            self._received.next(struct.pack(">I", len(view)), told), mac
        ):
            raise CorruptData(
                "a frame is not the next one that the other side has sent: frames are being changed on the way"
            )
        return decode_body(told)

    async def encode_async(self, header: dict[str, Any], payload: bytes | memoryview = b"") -> list[bytes | memoryview]:
        """Do what :meth:`encode` does, and let the loop go on while a long MAC is made: other frames may be sent then.

        The frame has its number when this returns, and is to be sent before anything else is awaited.
        """
        if self._sent is None or len(payload) <= _LARGE:
            return self.encode(header, payload)
        frame = encode_frame(header, payload, MAC_BYTES)
        return [*frame, self._sent.finish(await asyncio.to_thread(self._sent.start, *frame))]

    async def decode_async(self, body: bytes | bytearray | memoryview) -> tuple[dict[str, Any], memoryview]:
        """Do what :meth:`decode` does, and let the loop go on while a long MAC is checked."""
        if self._received is None or len(body) <= _LARGE:
            return self.decode(body)
        return await asyncio.to_thread(self.decode, body)
