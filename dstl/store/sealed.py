"""A store whose objects are sealed with a key: who can write to the bucket, and has not the key, cannot forge state.

An object is stored in chunks of 16 KiB, each followed by 16 bytes of HMAC-SHA256 over the object's name, the chunk's
number, whether it is the last, and its bytes. So a ranged GET is verified by itself, for one range of chunks more than
covers it, and an object that was changed, cut, extended or put under another name is refused before a byte of it is
used. Names are written once, so a location that was never emptied has no older object of the same name to put back.

Three things a seal does not do: it hides nothing, it does not bring back what was deleted (a manifest log without its
last manifests is an older one), and it does not tell two locations of one key apart.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace

from dstl.errors import CorruptData, Invalid
from dstl.runtime import call_in_thread
from dstl.store.base import ByteRange, ObjectInfo, ObjectStore, check_name

CHUNK_BYTES = 16 << 10
"""Bytes that have one seal. Smaller: a small range reads less beyond itself; larger: fewer seals."""
SEAL_BYTES = 16  # 128 bits: cannot be guessed
_STORED_CHUNK = CHUNK_BYTES + SEAL_BYTES
_LARGE = 1 << 20  # seals of more take longer than a switch of threads
_MIN_KEY_BYTES = 32  # 128 bits in hexadecimal digits: what is shorter is a password
_PURPOSE = b"dstl object seal 1"
_PLACE = struct.Struct("<HQ?")


class SealedStore:
    """Seals what is stored in another store, and verifies what is read. Sizes are those of the objects without seals.

    Args:
        inner: Closed together with this one.
        key: At least 32 bytes; the same in every process that opens the location, for as long as its objects live.

    Raises:
        Invalid: The key is shorter.
    """

    def __init__(self, inner: ObjectStore, key: bytes) -> None:
        if len(key) < _MIN_KEY_BYTES:
            raise Invalid(f"a sealing key has at least {_MIN_KEY_BYTES} bytes, and this one {len(key)}: make a new one")
        self.inner = inner
        self._mac = hmac.new(hmac.digest(key, _PURPOSE, hashlib.sha256), digestmod=hashlib.sha256)

    @property
    def location(self) -> str:
        """The inner store's."""
        return self.inner.location

    async def put(self, name: str, data: bytes | memoryview, *, if_absent: bool = False) -> ObjectInfo:
        """Store an object with its seals; see :meth:`ObjectStore.put <dstl.store.base.ObjectStore.put>`."""
        check_name(name)
        sealed = await call_in_thread(self._seal, name, data) if len(data) > _LARGE else self._seal(name, data)
        return replace(await self.inner.put(name, sealed, if_absent=if_absent), size=len(data))

    async def get(self, name: str, byte_range: ByteRange | None = None) -> bytes:
        """Return an object's bytes, or a range of them.

        Raises:
            CorruptData: They are not what a holder of the key has stored under this name.
        """
        first, wanted = 0, None
        if byte_range is not None:
            first, last = byte_range.start // CHUNK_BYTES, (byte_range.stop - 1) // CHUNK_BYTES
            wanted = ByteRange(first * _STORED_CHUNK, (last + 1) * _STORED_CHUNK)
        stored = await self.inner.get(name, wanted)
        if wanted is not None and not stored:
            # The object must end before: its last chunk says whether it does.
            size = (await self.inner.head(name)).size
            first = max(0, size - 1) // _STORED_CHUNK
            self._open(name, await self.inner.get(name, ByteRange(first * _STORED_CHUNK, max(1, size))), first, None)
            return b""
        expected = None if wanted is None else wanted.stop - wanted.start
        if len(stored) > _LARGE:
            plain = await call_in_thread(self._open, name, stored, first, expected)
        else:
            plain = self._open(name, stored, first, expected)
        if byte_range is None:
            return plain
        before = first * CHUNK_BYTES
        return plain[byte_range.start - before : byte_range.stop - before]

    async def head(self, name: str) -> ObjectInfo:
        """Return size and age of an object, as the store says them: only its bytes are sealed."""
        return _plain(await self.inner.head(name))

    async def list(self, prefix: str = "") -> AsyncGenerator[ObjectInfo, None]:
        """Yield objects as the store says them."""
        async for info in self.inner.list(prefix):
            yield _plain(info)

    async def delete(self, names: Sequence[str]) -> None:
        """Delete objects; a name that is already gone is a success."""
        await self.inner.delete(names)

    async def close(self) -> None:
        """Close the inner store. Idempotent."""
        await self.inner.close()

    def _seal(self, name: str, data: bytes | memoryview) -> bytes:
        view = memoryview(data)
        pieces: list[bytes | memoryview] = []
        count = max(1, -(-len(view) // CHUNK_BYTES))
        for number in range(count):
            chunk = view[number * CHUNK_BYTES : (number + 1) * CHUNK_BYTES]
            pieces += (chunk, self._tag(name, number, number == count - 1, chunk))
        return b"".join(pieces)

    def _open(self, name: str, stored: bytes, first: int, expected: int | None) -> bytes:
        """Return the bytes of stored chunks, of which the first has this number.

        Args:
            name: The object.
            stored: Its chunks.
            first: Number of the first of them.
            expected: Bytes that were asked for; None for all that there are.
        """
        view, pieces, number, ended = memoryview(stored), [], first, False
        for at in range(0, len(view), _STORED_CHUNK):
            chunk, tag = view[at : at + _STORED_CHUNK - SEAL_BYTES], view[at + CHUNK_BYTES : at + _STORED_CHUNK]
            if len(view) - at < _STORED_CHUNK:
                chunk, tag = view[at : len(view) - SEAL_BYTES], view[max(at, len(view) - SEAL_BYTES) :]
            is_last = at + _STORED_CHUNK >= len(view)
            ended = is_last and hmac.compare_digest(self._tag(name, number, True, chunk), tag)
            if not ended and not hmac.compare_digest(self._tag(name, number, False, chunk), tag):
                raise self._refusal(name)
            pieces.append(chunk)
            number += 1
        # What is shorter than was asked for must be the object's end; so must the end of a whole object.
        if not ended and (expected is None or len(stored) < expected):
            raise self._refusal(name)
        return b"".join(pieces)

    def _tag(self, name: str, number: int, is_last: bool, chunk: memoryview) -> bytes:
        mac, encoded = self._mac.copy(), name.encode()
        mac.update(_PLACE.pack(len(encoded), number, is_last) + encoded)
        mac.update(chunk)
        return mac.digest()[:SEAL_BYTES]

    def _refusal(self, name: str) -> CorruptData:
        return CorruptData(
            f"{self.location}: {name} is not what a holder of the sealing key has stored under this name: it was "
            "changed, moved, cut, or written without the key or with another one. Restore the object from a replica, "
            "and find out who can write there"
        )


def is_sealed(store: ObjectStore | None) -> bool:
    """Return whether all that a store gives was made by a holder of its key."""
    while store is not None and not isinstance(store, SealedStore):
        store = getattr(store, "inner", None)
    return store is not None


def _plain(info: ObjectInfo) -> ObjectInfo:
    """Return an object's facts without its seals; what is no sealed object has no size."""
    chunks = max(1, -(-info.size // _STORED_CHUNK))
    return replace(info, size=max(0, info.size - chunks * SEAL_BYTES))
