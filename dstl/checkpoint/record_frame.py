"""The frame of a record in a location: JSON, packed, between a magic and a checksummed tail.

Manifests and the records of savepoints have it (``handles/FORMAT.md``, parts 2 and 3); a manifest also has its inlined
segments in front of the body.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import google_crc32c
import zstandard
from pydantic import ValidationError
from pydantic_core import from_json

from dstl.errors import CorruptData, Invalid
from dstl.store.zstd_frame import decompress

_LENGTHS = struct.Struct("<II")
_TAIL = struct.Struct("<I8s")
_FIXED = _LENGTHS.size + _TAIL.size
_ALWAYS = 1 << 20  # so much memory is always there
_MAX_RATIO = 512
"""The most regular index of files that there can be, of paths of 500 characters, packs to a 274th. What packs better is
forged, and would have a few bytes take a gigabyte; :data:`_ALWAYS` bytes may pack as they like."""


@dataclass(frozen=True, slots=True)
class RecordFrame:
    """One kind of framed record.

    Attributes:
        magic: Its first bytes.
        end: Its last eight bytes.
        what: What it is, for messages.
        max_raw: Most bytes that a body may unpack to: what a reader allocates for a hostile one.
        too_large: What to do about a larger one, for messages.
        level: Of the body's compression.
        version: The format that a writer gives its records, and the newest that a reader takes.
        inlines: Whether bytes of other things may stand between magic and body.
    """

    magic: bytes
    end: bytes
    what: str
    max_raw: int
    too_large: str
    level: int
    version: int
    inlines: bool = False

    def pack(self, plain: dict[str, Any], inlined: Sequence[bytes] = ()) -> bytes:
        """Return the record of a JSON object, with ``inlined`` back to back behind the magic.

        Raises:
            Invalid: It is larger than any reader would take.
        """
        raw = json.dumps(plain, separators=(",", ":"), allow_nan=False).encode()
        if len(raw) > self.max_raw:
            raise Invalid(f"{self.what} of {len(raw)} bytes is too large: {self.too_large}")
        body = zstandard.ZstdCompressor(level=self.level).compress(raw)
        if _is_swollen(len(body), len(raw)):
            raise Invalid(f"{self.what} of {len(raw)} bytes packs into {len(body)}, as none does: {self.too_large}")
        front = b"".join((self.magic, *inlined, body, _LENGTHS.pack(len(body), len(raw))))
        return b"".join((front, _TAIL.pack(google_crc32c.value(front), self.end)))

    def unpack(self, data: bytes, subject: str, damaged: Callable[[str], CorruptData]) -> dict[str, Any]:
        """Return the JSON object of a record; everything is verified before anything is parsed.

        Args:
            data: The object.
            subject: Which it is, for messages.
            damaged: Makes the error of what is wrong.

        Raises:
            CorruptData: The bytes are not what was written.
            Invalid: A newer version wrote it.
        """
        if len(data) < len(self.magic) + _FIXED or data[: len(self.magic)] != self.magic:
            raise damaged(f"{len(data)} bytes that do not begin like {self.what}")
        checksum, end = _TAIL.unpack_from(data, len(data) - _TAIL.size)
        if end != self.end or google_crc32c.value(data[: -_TAIL.size]) != checksum:
            raise damaged("checksum or end mark is wrong")
        body_length, raw_length = _LENGTHS.unpack_from(data, len(data) - _FIXED)
        room = len(data) - _FIXED - len(self.magic)
        fits = body_length <= room if self.inlines else body_length == room
        if not fits or _is_swollen(body_length, raw_length):
            raise damaged(f"a body of {body_length} bytes, {raw_length} unpacked, is declared")
        body = data[len(data) - _FIXED - body_length : len(data) - _FIXED]
        try:
            plain = from_json(decompress(body, raw_length, max_size=self.max_raw), allow_inf_nan=False)
        except ValueError as error:
            raise damaged(str(error)) from None
        if not isinstance(plain, dict):
            raise damaged("its body is no JSON object")
        version = plain.get("version")
        if isinstance(version, int) and version > self.version:
            raise Invalid(f"{subject} has format {version}, this DSTL reads up to {self.version}: upgrade it")
        return plain


def _is_swollen(packed: int, raw: int) -> bool:
    return raw > max(_ALWAYS, _MAX_RATIO * packed)


def complaint(error: ValidationError) -> str:
    """Return the first thing that a model has against a record, on one line."""
    return "; ".join(line.strip() for line in str(error).splitlines()[1:3])
