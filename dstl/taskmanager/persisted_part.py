"""A TaskManager's reply to a persist, put together from where the log says that its change sets lie."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from dstl.changelog.log_segment import InlineSegment, LogSegment
from dstl.rpc.fleet_messages import Persisted, PersistedLog, PersistedSegment
from handles.key_group import KeyGroupRange
from handles.materialized_handle import MaterializationReport
from handles.segment_handle import SegmentHandle

__all__ = ["PersistedPart"]


class PersistedPart:
    """Collects the logs of one persist; each segment is listed once, with the key groups of all logs in it."""

    def __init__(self) -> None:
        self._index: dict[SegmentHandle | str, int] = {}
        self._segments: list[PersistedSegment] = []
        self._inlined: list[bytes] = []
        self._logs: list[PersistedLog] = []

    def add(self, log_id: str, operator: str, key_groups: KeyGroupRange, segments: Sequence[LogSegment]) -> None:
        """Add a log: which segments hold its change sets.

        Args:
            log_id: The log.
            operator: Its operator's uid.
            key_groups: Key groups that it may hold.
            segments: In order.
        """
        pieces = tuple((segment.range, self._place(segment.location, key_groups)) for segment in segments)
        self._logs.append(PersistedLog(log_id, operator, key_groups, pieces))

    def finish(self, materializations: Iterable[MaterializationReport], open_logs: Iterable[str]) -> Persisted:
        """Return the reply."""
        return Persisted(
            tuple(self._segments),
            tuple(self._logs),
            tuple(materializations),
            tuple(open_logs),
            inlined=b"".join(self._inlined),
        )

    def _place(self, where: SegmentHandle | InlineSegment, key_groups: KeyGroupRange) -> int:
        seal = where.id if isinstance(where, InlineSegment) else ""
        handle = SegmentHandle("", where.size, where.checksum) if isinstance(where, InlineSegment) else where
        at = self._index.setdefault(seal or handle, len(self._segments))
        if at < len(self._segments):
            known = self._segments[at].key_groups
            key_groups = KeyGroupRange(min(known.start, key_groups.start), max(known.end, key_groups.end))
            self._segments[at] = PersistedSegment(handle, key_groups, seal)
        else:
            self._segments.append(PersistedSegment(handle, key_groups, seal))
            if isinstance(where, InlineSegment):
                self._inlined.append(where.data)
        return at
