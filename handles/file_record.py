"""Files of a checkpoint directory in the manifest log: what one record adds to their index and removes from it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated
from urllib.parse import quote, unquote

from pydantic import Field, ValidationInfo, field_validator

from handles.materialized_handle import Frozen
from handles.segment_handle import SegmentHandle

PLAIN = "plain:"
"""Begins the name of what is no object of the log, but a file that Spark has written itself."""
FILES_OWNER = "files"
"""Stands for the query in a location of files alone: no ``StateBackend`` takes it for its own."""
_ELSEWHERE = "at:"
_BARRIER = re.compile(r"(offsets|commits)/(\d+)")
MAX_PATH = 512
"""Most characters of a path: those of an object's name, under which ``dstl files export`` writes the file."""

_Row = tuple[str, int, int, int, int, int]


def elsewhere(location: str, name: str) -> str:
    """Return the name of another location's object, which the fork of a directory uses and never deletes."""
    return f"{_ELSEWHERE}{quote(location, safe='/:')}#{name}"


def foreign_object(name: str) -> tuple[str, str] | None:
    """Return location and name of an object of another location; None for an object of the log's own."""
    if not name.startswith(_ELSEWHERE):
        return None
    location, _, inner = name.removeprefix(_ELSEWHERE).partition("#")
    return unquote(location), inner


def barrier_batch(path: str, kind: str | None = None) -> int | None:
    """Return the batch of a barrier, ``offsets/N`` or ``commits/N``; None for any other path, or another kind."""
    found = _BARRIER.fullmatch(path)
    return int(found[2]) if found is not None and kind in (None, found[1]) else None


def is_path(path: str) -> bool:
    """Return True for a path of at most :data:`MAX_PATH` characters without empty, ``.`` and ``..`` elements."""
    framed = f"/{path}/"
    return len(path) <= MAX_PATH and not any(wrong in framed for wrong in ("//", "/./", "/../", "\0"))


@dataclass(frozen=True, slots=True)
class FileEntry:
    """One file: the change set of a log that holds its bytes.

    Attributes:
        path: Relative to the checkpoint directory.
        size: In bytes.
        modified_ms: When it was written, Unix milliseconds by its writer's clock; for people and for Spark.
        segment: The segment that holds the change set.
        log_id: The log; empty for a file that was adopted, whose ``segment`` is the plain file, under its own path in
            the checkpoint directory behind :data:`PLAIN`.
        sqn: The change set's number in the log.
    """

    path: str
    size: int
    modified_ms: int
    segment: SegmentHandle
    log_id: str
    sqn: int


class FileRecord(Frozen):
    """One step of the index of a checkpoint directory's files: a micro-batch's offsets, or its commit.

    Attributes:
        barrier: The file that made the record, relative to the directory; empty for one that a driver's end has made.
        run_id: The run of the query whose files it holds.
        is_whole: The record holds the whole index, and not only what has changed: readers begin with such a one.
        segments: ``[name, size, CRC-32C, offset]`` of each segment.
        logs: Log ids.
        added: ``[path, size, modified_ms, segment, log, sqn]`` by their places in ``segments`` and ``logs``.
        removed: Paths that are gone.
    """

    barrier: str
    run_id: str
    is_whole: bool = False
    segments: tuple[tuple[str, Annotated[int, Field(ge=0)], int, Annotated[int, Field(ge=0)]], ...]
    logs: tuple[str, ...]
    added: tuple[_Row, ...]
    removed: tuple[str, ...] = ()

    # Of fields and not of the model, which would look through all of them once more with each record that holds it.
    @field_validator("added")
    @classmethod
    def _agree_with_what_is_listed(cls, added: tuple[_Row, ...], info: ValidationInfo) -> tuple[_Row, ...]:
        segments, logs = (len(info.data.get(name, ())) for name in ("segments", "logs"))
        for path, size, _, segment, log, sqn in added:
            if not is_path(path):
                raise ValueError(f"{path[:80]!r} is not a path of a file")
            if not (0 <= segment < segments and 0 <= log < logs and sqn >= 0 and size >= 0):
                raise ValueError(f"the entry of file {path!r} names a segment or log that its record does not list")
        return added

    @field_validator("removed")
    @classmethod
    def _are_paths(cls, removed: tuple[str, ...]) -> tuple[str, ...]:
        for path in removed:
            if not is_path(path):
                raise ValueError(f"{path[:80]!r} is not a path of a file")
        return removed

    @staticmethod
    def of(
        barrier: str,
        run_id: str,
        added: Iterable[FileEntry],
        removed: Sequence[str] = (),
        *,
        is_whole: bool = False,
        is_checked: bool = False,
    ) -> FileRecord:
        """Return the record of these entries; they may have been checked, as those of an index are."""
        segments: dict[SegmentHandle, int] = {}
        logs: dict[str, int] = {}
        rows = tuple(
            (
                each.path,
                each.size,
                each.modified_ms,
                segments.setdefault(each.segment, len(segments)),
                logs.setdefault(each.log_id, len(logs)),
                each.sqn,
            )
            for each in added
        )
        return (FileRecord.model_construct if is_checked else FileRecord)(
            barrier=barrier,
            run_id=run_id,
            is_whole=is_whole,
            segments=tuple((s.name, s.size, s.checksum, s.offset) for s in segments),
            logs=tuple(logs),
            added=rows,
            removed=tuple(removed),
        )

    def entries(self) -> list[FileEntry]:
        """Return the entries that it adds."""
        handles = [SegmentHandle(*fields) for fields in self.segments]
        return [
            FileEntry(path, size, modified_ms, handles[segment], self.logs[log], sqn)
            for path, size, modified_ms, segment, log, sqn in self.added
        ]
