"""The history of a job: figures of its last checkpoints, failures and restores, which manifests carry along.

Records of old checkpoints are deleted, and what one took is not known before it is written: so each record holds the
figures of those before it, the newest last, and of its own checkpoint what is known by then.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from handles.materialized_handle import Frozen

_Count = Annotated[int, Field(ge=0)]
_Seconds = Annotated[float, Field(ge=0)]
_MOST_ERROR = 200  # a line of a terminal or two: the log has the rest
_MOST_ENTRIES = 10_000  # ten times the most that an option allows; a forged list must not be believed


class HistoryEntry(Frozen):
    """One checkpoint, failed checkpoint or restore. Shown to people and decides nothing.

    Attributes:
        kind: ``checkpoint``, ``failed`` or ``restore``.
        at: When it ended, Unix seconds by the driver's clock.
        checkpoint_id: Its number; of a restore, that of what was restored; 0 for none.
        batch_id: The micro-batch; of a restore, the first of its run.
        seconds: What the batch, or the start, waited; None while it is not known.
        persist_s: Part of it: until every TaskManager had made its changes durable or handed them over, and
            the files that Spark wrote beside them were taken in.
        assemble_s: Part of it: the manifest was put together.
        commit_s: Part of it: the manifest was stored; None while it is not known.
        notify_s: Part of it: the TaskManagers were told; None while it is not known.
        requests: Requests to the store.
        hedges: How many of them were hedges of TaskManagers.
        new_bytes: Bytes of segments that it added; of a restore, bytes read.
        full_bytes: Bytes of everything it refers to.
        inlined: Segments inside the manifest.
        materializations: Those that it was the first to name.
        late_rows: Rows of the batch that came too late.
        state_rows: Entries of all tables before the batch.
        state_bytes: Their bytes.
        error: Why it failed; else empty.
    """

    kind: Literal["checkpoint", "failed", "restore"]
    at: float
    checkpoint_id: _Count = 0
    batch_id: Annotated[int, Field(ge=-1)] = 0
    seconds: _Seconds | None = None
    persist_s: _Seconds | None = None
    assemble_s: _Seconds | None = None
    commit_s: _Seconds | None = None
    notify_s: _Seconds | None = None
    requests: _Count = 0
    hedges: _Count = 0
    new_bytes: _Count = 0
    full_bytes: _Count = 0
    inlined: _Count = 0
    materializations: _Count = 0
    late_rows: _Count = 0
    state_rows: _Count = 0
    state_bytes: _Count = 0
    error: Annotated[str, Field(max_length=_MOST_ERROR + 100)] = ""


_COLUMNS = tuple(HistoryEntry.model_fields)
_ABSENT = {name: field.default for name, field in HistoryEntry.model_fields.items() if not field.is_required()}


class CheckpointHistory:
    """Keeps the last entries. One event loop.

    Args:
        limit: How many.
    """

    def __init__(self, limit: int) -> None:
        self._entries: deque[HistoryEntry] = deque(maxlen=limit)

    @property
    def entries(self) -> Sequence[HistoryEntry]:
        """The entries, oldest first."""
        return tuple(self._entries)

    def add(self, entry: HistoryEntry) -> None:
        """Add an entry, which takes the place of a partial one of its checkpoint."""
        last = self._entries[-1] if self._entries else None
        is_partial = last is not None and last.seconds is None and entry.kind != "restore"
        if is_partial and last is not None and last.checkpoint_id == entry.checkpoint_id:
            self._entries.pop()
        self._entries.append(entry)

    def learn(self, earlier: Iterable[HistoryEntry]) -> None:
        """Begin with what an earlier driver has known, unless there is something already."""
        if not self._entries:
            self._entries.extend(earlier)


def pack_history(entries: Sequence[HistoryEntry]) -> dict[str, list[Any]]:
    """Return the entries as columns, without those in which all have the default: it is what packs well."""
    columns: dict[str, list[Any]] = {}
    for name in _COLUMNS:
        values = [getattr(entry, name) for entry in entries]
        if name not in _ABSENT or any(value != _ABSENT[name] for value in values):
            columns[name] = [round(value, 4) if isinstance(value, float) else value for value in values]
    return columns


def unpack_history(columns: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the entries as plain rows, still to be validated.

    Raises:
        ValueError: There are no columns, or they are of different lengths, or too long.
    """
    lengths = {len(values) if isinstance(values, list) else -1 for values in columns.values()}
    if len(lengths) > 1 or not lengths <= set(range(_MOST_ENTRIES + 1)):
        raise ValueError("the history's columns are not lists of one length")
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
