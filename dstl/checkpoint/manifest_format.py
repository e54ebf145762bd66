"""The bytes of a record in the manifest log: fence, checkpoint, abort marker (``handles/FORMAT.md``, part 2).

``"DSTLMAN1" | inlined segments | body | u32 body length | u32 raw length | u32 CRC-32C of all before | "1NAMLTSD"``,
little-endian. The body is a zstd frame of JSON. Inlined segments come first, back to back, so that their offsets do not
depend on the body, which contains them.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from itertools import accumulate
from typing import Annotated, Any, Literal

import google_crc32c
import zstandard
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import from_json

from dstl.checkpoint.segment_rows import pack_segments, unpack_segments
from dstl.errors import CorruptData, Invalid
from handles.checkpoint import CompletedCheckpoint

__all__ = ["MANIFEST_VERSION", "ManifestRecord", "decode_record", "encode_record", "inline_offsets"]

MANIFEST_VERSION = 2
"""The newest; a record is written with the oldest that can say what it says, so that an older DSTL reads it."""
_TABLE_FILES = 2
_MAGIC, _END = b"DSTLMAN1", b"1NAMLTSD"
_LENGTHS = struct.Struct("<II")
_TAIL = struct.Struct("<I8s")
_FIXED = _LENGTHS.size + _TAIL.size
_MAX_RAW = 128 << 20
"""Most bytes that a body may unpack to: a million segments; what a reader allocates for a hostile one."""


class ManifestRecord(BaseModel):
    """One record of the manifest log.

    Attributes:
        version: Format version of the body, at least the one that its checkpoint needs; a reader refuses a newer one.
        kind: ``fence`` (a driver took over), ``checkpoint``, or ``abort`` (a commit at this number was given up).
        sequence: Its number in the log; also in its name.
        epoch: Number of the fence of the driver that wrote it.
        oldest: The cleanup boundary: no checkpoint below it is retained, so its record may be gone, or come back to
            life by a late request, and means nothing either way. Never falls along the log.
        put_id: Random; tells a driver its own record after a lost response.
        query_id: The query that owns the location; empty in a fence that was won before any batch.
        created_at: Unix seconds by the driver's clock; shown to people, decides nothing.
        checkpoint: The body of a checkpoint; None in the other kinds.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    version: Annotated[int, Field(ge=1, strict=True)] = 1
    kind: Literal["fence", "checkpoint", "abort"]
    sequence: Annotated[int, Field(ge=1)]
    epoch: Annotated[int, Field(ge=1)]
    oldest: Annotated[int, Field(ge=0)] = 0
    put_id: str
    query_id: str
    created_at: float
    checkpoint: CompletedCheckpoint | None = None

    @model_validator(mode="after")
    def _agrees_with_itself(self) -> ManifestRecord:
        if self.epoch > self.sequence or self.oldest > self.sequence:
            raise ValueError(f"record {self.sequence} is older than its epoch {self.epoch} or boundary {self.oldest}")
        if (self.kind == "checkpoint") != (self.checkpoint is not None):
            raise ValueError(f"a {self.kind} with the wrong body")
        if self.checkpoint is not None and (self.checkpoint.checkpoint_id, self.checkpoint.query_id) != (
            self.sequence,
            self.query_id,
        ):
            raise ValueError(f"record {self.sequence} holds the checkpoint of another record or query")
        return self


def encode_record(record: ManifestRecord, inlined: Sequence[bytes] = ()) -> bytes:
    """Return a record's bytes, with its inlined segments at the places that :func:`inline_offsets` gives.

    Raises:
        Invalid: The checkpoint has more parts than any reader would take.
    """
    plain: dict[str, Any] = record.model_dump(mode="json", exclude={"checkpoint": {"segments"}})
    if record.checkpoint is None:
        del plain["checkpoint"]
    else:
        plain["checkpoint"] |= pack_segments(record.checkpoint)
        for base in plain["checkpoint"]["materialized"]:
            if base["files"]:
                plain["version"] = max(plain["version"], _TABLE_FILES)
            else:
                del base["files"]
    raw = json.dumps(plain, separators=(",", ":"), allow_nan=False).encode()
    if len(raw) > _MAX_RAW:
        raise Invalid(f"a manifest of {len(raw)} bytes is too large: materialize more often, or use fewer TaskManagers")
    body = zstandard.ZstdCompressor(level=1).compress(raw)
    front = b"".join((_MAGIC, *inlined, body, _LENGTHS.pack(len(body), len(raw))))
    return b"".join((front, _TAIL.pack(google_crc32c.value(front), _END)))


def inline_offsets(sizes: Sequence[int]) -> list[int]:
    """Return where inlined segments of these sizes lie, in bytes from the start of the record."""
    return list(accumulate(sizes, initial=len(_MAGIC)))[:-1]


def decode_record(data: bytes, name: str) -> ManifestRecord:
    """Read a record back; everything is verified before anything is parsed.

    Memory is bounded: nothing is unpacked beyond what the record declares, nor beyond 128 MiB.

    Raises:
        CorruptData: The bytes are not what was written.
        Invalid: A newer version wrote it.
    """

    def damaged(why: str) -> CorruptData:
        return CorruptData(f"manifest {name} is damaged ({why}): restore the object, or choose an older checkpoint")

    if len(data) < len(_MAGIC) + _FIXED or data[: len(_MAGIC)] != _MAGIC:
        raise damaged(f"{len(data)} bytes that do not begin like a manifest")
    checksum, end = _TAIL.unpack_from(data, len(data) - _TAIL.size)
    if end != _END or google_crc32c.value(data[: -_TAIL.size]) != checksum:
        raise damaged("checksum or end mark is wrong")
    body_length, raw_length = _LENGTHS.unpack_from(data, len(data) - _FIXED)
    if body_length > len(data) - _FIXED - len(_MAGIC) or raw_length > _MAX_RAW:
        raise damaged(f"a body of {body_length} bytes, {raw_length} unpacked, is declared")
    body = data[len(data) - _FIXED - body_length : len(data) - _FIXED]
    try:
        # The frame's own size is checked first: zstandard ignores max_output_size where the frame states one.
        if zstandard.frame_content_size(body) != raw_length:
            raise damaged("the body's frame states another size")
        raw = zstandard.ZstdDecompressor().decompress(body, max_output_size=raw_length, allow_extra_data=False)
        plain = from_json(raw)
    except (zstandard.ZstdError, ValueError) as error:
        raise damaged(str(error)) from None
    version = plain.get("version") if isinstance(plain, dict) else None
    if isinstance(version, int) and version > MANIFEST_VERSION:
        raise Invalid(f"manifest {name} has format {version}, this DSTL reads up to {MANIFEST_VERSION}: upgrade it")
    try:
        if isinstance(plain, dict) and isinstance(plain.get("checkpoint"), dict):
            plain["checkpoint"] |= unpack_segments(plain["checkpoint"])
        return ManifestRecord.model_validate(plain)
    except ValidationError as error:
        raise damaged("; ".join(line.strip() for line in str(error).splitlines()[1:3])) from None
    except (ValueError, TypeError, KeyError) as error:
        raise damaged(str(error)) from None
