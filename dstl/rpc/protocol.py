"""Secret and frames of every socket between drivers, TaskManagers and workers.

A frame is ``u32 body length | u32 header length | header (msgpack map) | payload (raw bytes) | MAC``, big-endian; the
body is everything behind its length. A request names its method; a reply holds either ``ok`` fields or an ``error``
pair. Nothing is ever unpickled. Whether there is a MAC is the connection's business (``dstl.rpc.framing``); the
frames of a handshake (``dstl.rpc.handshake``) have none, and are not longer than :data:`MAX_HANDSHAKE`.
"""

from __future__ import annotations

import secrets
import socket
import struct
from collections.abc import Callable
from itertools import count
from typing import Any

import msgpack

from dstl.errors import CorruptData, Invalid, error_from_wire, error_to_wire
from dstl.private_file import check_strength, read_private_file

__all__ = [
    "MAX_FRAME",
    "MAX_HANDSHAKE",
    "PREFIX_BYTES",
    "PROTOCOL_VERSION",
    "Secret",
    "decode_body",
    "encode_frame",
    "error_reply",
    "frame_length",
    "raise_for",
    "set_tcp_options",
]

PROTOCOL_VERSION = 7
"""Grows with every change of a message, a frame or the handshake: both sides must have the same."""
MAX_FRAME = 256 << 20
"""No frame is longer, in bytes: a bigger length is refused before anything is allocated."""
MAX_HANDSHAKE = 1024
"""No frame of a handshake is longer, in bytes: whoever is not authenticated makes nobody allocate."""
PREFIX_BYTES = 4
_MAX_HEADER = 16 << 20
_MAX_CONTAINERS = 1 << 18
"""Lists and maps in a header: a byte each in the frame, up to a hundred in memory. A list of files has one for each."""
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

    def __reduce__(self) -> tuple[type[Secret], tuple[bytes]]:
        return Secret, (self._key,)

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
    return [struct.pack(">II", body, len(packed)), packed, payload]


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
        note = _counted() if length > _MAX_CONTAINERS else None
        header = msgpack.unpackb(
            view[4 : 4 + length], raw=False, strict_map_key=False, list_hook=note, object_hook=note
        )
    except (ValueError, TypeError, RecursionError, msgpack.exceptions.UnpackException) as error:
        # A TypeError: a map under a key that cannot be one.
        raise CorruptData(f"a frame's header is not msgpack: {error}") from None
    if not isinstance(header, dict):
        raise CorruptData("a frame's header is not a map")
    return header, view[4 + length :]


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
    raise CorruptData("a reply carries an error that is none")


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
