"""Framing writes and reads the frames of one connection: plain, or each with a MAC under the connection's own keys.

A MAC stands at the end of a frame's body and covers the frame's number in its direction, the length field and the body,
under a key that is of this connection and direction alone. So a frame that was changed, left out, repeated, sent back
or taken over from another connection is found out before anything of it is read. It is keyed BLAKE2b of 16 bytes:
0.8 us for a small frame and 1.4 ms per MB, where HMAC-SHA256 takes 3.6 us and, by the processor's own instructions, as
long per MB.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import struct
from typing import Any

from dstl.errors import CorruptData
from dstl.rpc.protocol import decode_body, encode_frame

__all__ = ["MAC_BYTES", "FrameMac", "Framing"]

MAC_BYTES = 16
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
        mac = self._keyed.copy()
        mac.update(struct.pack(">Q", self._count))
        for buffer in buffers:
            mac.update(buffer)
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

    @property
    def is_sealed(self) -> bool:
        """True where frames carry MACs."""
        return self._sent is not None

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
            raise CorruptData("a frame is not the next one that the other side has sent: somebody changes the bytes")
        return decode_body(told)

    async def encode_async(self, header: dict[str, Any], payload: bytes | memoryview = b"") -> list[bytes | memoryview]:
        """Do what :meth:`encode` does, and let the loop go on while a long MAC is made."""
        if self._sent is None or len(payload) <= _LARGE:
            return self.encode(header, payload)
        return await asyncio.to_thread(self.encode, header, payload)

    async def decode_async(self, body: bytes | bytearray | memoryview) -> tuple[dict[str, Any], memoryview]:
        """Do what :meth:`decode` does, and let the loop go on while a long MAC is checked."""
        if self._received is None or len(body) <= _LARGE:
            return self.decode(body)
        return await asyncio.to_thread(self.decode, body)
