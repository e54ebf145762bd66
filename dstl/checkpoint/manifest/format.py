"""The bytes of a record in the manifest log: fence, checkpoint, files, abort marker (``handles/FORMAT.md``, part 2).

``"DSTLMAN1" | inlined segments | body | u32 body length | u32 raw length | u32 CRC-32C of all before | "1NAMLTSD"``,
little-endian. The body is a zstd frame of JSON. Inlined segments come first, back to back, so that their offsets do not
depend on the body, which contains them.

Per log the change sets of a checkpoint are contiguous and in order from the log's first, so a range needs no sequence
numbers: only how many change sets come next. And neighbouring logs mostly bring the same number, so a *run* says it for
several at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, model_validator

from dstl.checkpoint.manifest.history import HistoryEntry, pack_history, unpack_history
from dstl.checkpoint.record_frame import RecordFrame, complaint
from dstl.errors import CorruptData, Invalid
from handles.checkpoint import CompletedCheckpoint, SegmentEntry
from handles.file_record import FileRecord
from handles.materialized_handle import Frozen

_MAX_RANGES = 1 << 20
"""Most ranges of a checkpoint: a run may stand for many, so the length of the body does not bound them."""


def pack_segments(checkpoint: CompletedCheckpoint) -> dict[str, Any]:
    """Return ``segments`` with a row for each.

    A row is ``[name, size, checksum, offset, first key group, last key group, checkpoint, runs]``; ``runs`` is a flat
    list of ``log, logs, change sets``: so many logs, beginning with that one, each have so many change sets here.

    Raises:
        Invalid: More ranges than a reader takes.
    """
    rows = []
    ranges = 0
    for entry in checkpoint.segments:
        runs: list[int] = []
        log_after, sets_before = -1, -1
        for log, from_sqn, to_sqn in entry.ranges:
            if log == log_after and to_sqn - from_sqn == sets_before:
                runs[-2] += 1
            else:
                sets_before = to_sqn - from_sqn
                runs += (log, 1, sets_before)
            log_after = log + 1
        ranges += len(entry.ranges)
        rows.append([*entry.segment, entry.first_key_group, entry.last_key_group, entry.checkpoint, runs])
    if ranges > _MAX_RANGES:
        raise Invalid(f"a checkpoint of {ranges} ranges is too large for a manifest: materialize more often")
    return {"segments": rows}


def unpack_segments(checkpoint: dict[str, Any]) -> dict[str, list[SegmentEntry]]:
    """Return ``segments`` as entries; the inverse of :func:`pack_segments`. The input is not trusted.

    Raises:
        ValueError, TypeError, KeyError: Not rows.
    """
    following = [int(log["from_sqn"]) for log in checkpoint["logs"]]
    ranges = 0
    entries = []
    for name, size, checksum, offset, first, last, came_with, runs in checkpoint["segments"]:
        held = []
        for at in range(0, len(runs), 3):
            log, logs, sets = runs[at : at + 3]
            ranges += logs
            if not (0 <= log < log + logs <= len(following) and sets > 0 and ranges <= _MAX_RANGES):
                raise ValueError(f"a run of {logs} logs from {log}, {sets} change sets each, cannot be")
            for each in range(log, log + logs):
                held.append((each, following[each], following[each] + sets))
                following[each] += sets
        entries.append(
            SegmentEntry(
                segment=(name, size, checksum, offset),
                first_key_group=first,
                last_key_group=last,
                ranges=tuple(held),
                checkpoint=came_with,
            )
        )
    return {"segments": entries}


MANIFESTS = "manifests/"
"""Every record's name has this prefix."""
_LARGEST = 10**20 - 1  # of so many digits; a number has 63 bits


MANIFEST_VERSION = 1  # nothing has been released since the first
FORGOTTEN_S = 86_400.0
"""A record below the cleanup boundary is deleted at this age, in seconds, and not before: its name, once free, refuses
an older driver no more. A driver whose last record is half as old looks whether it still leads; the other half is a
margin for clocks. A day: a query with a batch an hour never has to look, and a scheduled one has some hundred records
to list."""
_FRAME = RecordFrame(
    magic=b"DSTLMAN1",
    end=b"1NAMLTSD",
    what="a manifest",
    max_raw=128 << 20,  # a million segments
    too_large="materialize more often, or use fewer TaskManagers",
    level=1,
    version=MANIFEST_VERSION,
    inlines=True,
)


def manifest_name(sequence: int) -> str:
    """Return the object name of a record: the number counted down, so that a listing begins with the newest.

    Records below the cleanup boundary stay for a day. A start looks past none of them.
    """
    return f"{MANIFESTS}{_LARGEST - sequence:020d}.dstl"


def manifest_sequence(name: str) -> int | None:
    """Return the number in a record's name, or None where the name is not a record's."""
    stem = name.removeprefix(MANIFESTS).removesuffix(".dstl")
    sequence = _LARGEST - int(stem) if stem.isascii() and stem.isdigit() else 0
    return sequence if sequence > 0 and name == manifest_name(sequence) else None


class ManifestRecord(Frozen):
    """One record of the manifest log.

    Attributes:
        version: Format version of the body; a reader refuses a newer one.
        kind: ``fence`` (a driver took over), ``checkpoint``, ``files`` (of a checkpoint directory), or ``abort`` (a
            commit at this number was given up).
        sequence: Its number in the log; also in its name.
        epoch: Number of the fence of the driver that wrote it.
        oldest: The cleanup boundary: no checkpoint below it is retained, so its record may be gone, or come back to
            life by a late request, and means nothing either way. Never falls along the log.
        put_id: Random; tells a driver its own record after a lost response.
        query_id: The query that owns the location; empty in a fence that was won before any batch.
        created_at: Unix seconds by the driver's clock; shown to people, decides nothing.
        history: The figures of the checkpoints, failures and restores before it, oldest first, and at its end what is
            known of its own; for people. Empty in fences and abort markers.
        checkpoint: The body of a checkpoint; None in the other kinds.
        files: The body of a ``files`` record; in a ``checkpoint`` what Spark's own commit of the batch adds, where it
            lies in this log; None in the other kinds.
    """

    version: Annotated[int, Field(ge=1, strict=True)] = MANIFEST_VERSION
    kind: Literal["fence", "checkpoint", "abort", "files"]
    sequence: Annotated[int, Field(ge=1)]
    epoch: Annotated[int, Field(ge=1)]
    oldest: Annotated[int, Field(ge=0)] = 0
    put_id: str
    query_id: str
    created_at: float
    history: tuple[HistoryEntry, ...] = ()
    checkpoint: CompletedCheckpoint | None = None
    files: FileRecord | None = None

    @model_validator(mode="after")
    def _agrees_with_itself(self) -> ManifestRecord:
        if self.epoch > self.sequence or self.oldest > self.sequence:
            raise ValueError(f"record {self.sequence} is older than its epoch {self.epoch} or boundary {self.oldest}")
        has_files = self.files is not None
        if (self.kind == "checkpoint") != (self.checkpoint is not None) or (
            has_files if self.kind in ("fence", "abort") else self.kind == "files" and not has_files
        ):
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
    plain: dict[str, Any] = record.model_dump(
        mode="json", exclude={"checkpoint": {"segments"}, "history": True, "files": {"added"}}
    )
    if record.history:
        plain["history"] = pack_history(record.history)
    if record.files is None:
        del plain["files"]
    else:
        # Rows of plain values: tens of thousands, where the index is whole.
        plain["files"]["added"] = record.files.added
    if record.checkpoint is None:
        del plain["checkpoint"]
    else:
        plain["checkpoint"] |= pack_segments(record.checkpoint)
    return _FRAME.pack(plain, inlined)


def inline_offsets(sizes: Sequence[int]) -> list[int]:
    """Return the offsets of inlined segments of these sizes, in bytes from the start of the record."""
    return list(accumulate(sizes, initial=len(_FRAME.magic)))[:-1]


def decode_record(data: bytes, name: str) -> ManifestRecord:
    """Read a record back; everything is verified before anything is parsed.

    Memory is bounded: nothing is unpacked beyond what the record declares, nor beyond 128 MiB.

    Raises:
        CorruptData: The bytes are not what was written.
        Invalid: A newer version wrote it.
    """

    def damaged(why: str) -> CorruptData:
        return CorruptData(
            f"manifest {name} is damaged ({why}): bring it back from a replica, or go on from the checkpoint before "
            'it with StateBackend(..., restore="previous")'
        )

    plain = _FRAME.unpack(data, f"manifest {name}", damaged)
    try:
        if isinstance(plain.get("checkpoint"), dict):
            plain["checkpoint"] |= unpack_segments(plain["checkpoint"])
        if "history" in plain:
            plain["history"] = unpack_history(plain["history"])
        return ManifestRecord.model_validate(plain)
    except ValidationError as error:
        raise damaged(complaint(error)) from None
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise damaged(str(error)) from None
