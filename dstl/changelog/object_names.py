"""Names of segments and base files: the one place that builds and reads them.

``<shard>/<query id>/<writer id>/<unique>.seg``, ``.base`` for a base file of a materialization. The shard is a short
random first path element, another one for each attempt at the same object, so that a retry or hedge reaches another
partition of the store (FLIP-158, "request hedging": unique prefixes). Query and writer id say whose it is, for the
cleaner and for people; the last element is unique per attempt, so nothing is ever overwritten and a late loser is an
orphan, never a resurrection. Where the store spreads over several locations, the location's name stands in front.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from dstl.errors import Invalid
from dstl.runtime import Runtime
from dstl.store.base import check_name

_SHARDS = 1 << 16  # four hexadecimal digits: S3 splits a bucket by such prefixes, as far as its load asks for
_SEGMENT = re.compile(
    r"(?:(s[0-9]{1,4})/)?([0-9a-f]{4})/([A-Za-z0-9_=.\-]+)/([A-Za-z0-9_=.\-]+)/([0-9a-f]{32})\.(seg|base)"
)


@dataclass(frozen=True, slots=True)
class SegmentName:
    """The parts of a segment's object name.

    Attributes:
        location: Which of several locations, as ``s0``; empty where there is one.
        shard: Four hexadecimal digits, random per attempt.
        query_id: Whose log it is.
        writer_id: The TaskManager process that stored it.
        unique: 32 hexadecimal digits that no other attempt has.
        kind: ``seg`` for a segment of the log, ``base`` for a base file.
    """

    location: str
    shard: str
    query_id: str
    writer_id: str
    unique: str
    kind: str = "seg"

    def __str__(self) -> str:
        front = f"{self.location}/" if self.location else ""
        return f"{front}{self.shard}/{self.query_id}/{self.writer_id}/{self.unique}.{self.kind}"


def parse_segment_name(name: str) -> SegmentName | None:
    """Return the parts of a segment's or base file's name; None for a name that is neither's."""
    found = _SEGMENT.fullmatch(name)
    return SegmentName(found[1] or "", *found.groups()[1:]) if found is not None else None


class SegmentNames:
    """Makes the names of one TaskManager's segments.

    Args:
        query_id: The streaming query's id: one path element.
        writer_id: The TaskManager incarnation's id, by which the cleaner knows its segments as alive: one path element.
        runtime: Source of shards and unique parts.
        locations: First path elements of a store's several locations (``dstl.store.shard_names``); attempts at one
            object go to different ones in turn. Empty, or one, for a store of one location.

    Raises:
        Invalid: An id is not one path element of the grammar of names.
    """

    def __init__(self, query_id: str, writer_id: str, runtime: Runtime, locations: Sequence[str] = ()) -> None:
        for each in (query_id, writer_id):
            if "/" in check_name(each):
                raise Invalid(f"not one path element: {each!r}; query and writer ids hold no slash")
        self.query_id = query_id
        self.writer_id = writer_id
        self._runtime = runtime
        self._locations = tuple(locations) if len(locations) > 1 else ("",)

    def new_object(self, kind: Literal["seg", "base"] = "seg") -> Callable[[int], str]:
        """Return the naming of one object of a kind: attempt number (from 0) to a new object name.

        Attempts 0 to 65,535 of one object have distinct shards.
        """
        first = self._runtime.entropy.randrange(_SHARDS)
        # An odd step visits every shard before it repeats one.
        step = self._runtime.entropy.randrange(1, _SHARDS, 2)

        def name_of(attempt: int) -> str:
            shard = f"{(first + attempt * step) % _SHARDS:04x}"
            location = self._locations[(first + attempt) % len(self._locations)]
            return check_name(
                str(SegmentName(location, shard, self.query_id, self.writer_id, self._runtime.new_id(), kind))
            )

        return name_of
