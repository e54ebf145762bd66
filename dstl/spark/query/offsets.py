"""Spark's record of a batch's offsets, read by the sources that a query has now.

Spark finds an offset by its place among all, and ours come and go with what the operators are given: event time,
``tick=``, ``initialState``. So a run is given the record with a line for each source that it has.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from dstl.errors import Invalid
from dstl.spark.query.ticks import TICKS, WATERMARKS, once_of

_FIRST_OFFSET = 2
"""Of a record's lines; before it are the version and the batch's settings."""

_NOTHING = b"-"
"""What Spark records of a source that has brought nothing yet."""
_INITIAL = once_of("")


def fitted_offsets(content: bytes, sources: Sequence[str]) -> bytes:
    """Return a record of offsets with a line for each of a query's sources.

    Args:
        content: The record, as some run has written it.
        sources: Names of the query's sources, in Spark's order, those of initial state with their operators.

    Raises:
        Invalid: The sources that are not ours are others, or stand in other places, by which Spark finds what it keeps
            of them, too. Or an operator has initial state that had none when the query began.
    """
    lines = content.split(b"\n")
    wanted = [name if _is_ours(name) else "" for name in sources]
    if lines[0] == b"v2":
        _check_numbered(lines[_FIRST_OFFSET:], wanted)
    kinds = [_kind(line) for line in lines[_FIRST_OFFSET:]]
    if kinds == wanted or lines[0] != b"v1":
        return content
    if _places(kinds) != _places(wanted):
        raise Invalid(
            f"the offsets of this query are of {_said(kinds)}, and it has {_said(wanted)} now. Spark finds a source by "
            "its place: take the sources as they were, those in broadcast= included, and event time, tick= and "
            "initialState in front of the last of them (event time brings no source where "
            "spark.sql.streaming.noDataMicroBatches.enabled=false: windows then end with the next rows); or begin a "
            "new location with a savepoint (restore_from=)"
        )
    for kind in wanted:
        if kind.startswith(_INITIAL) and wanted.count(kind) > kinds.count(kind):
            raise Invalid(
                f"operator {kind.removeprefix(_INITIAL)!r}: initialState is given in a query's first batch, and this "
                "one has begun without: leave it out, or begin a new location, whose sources are read from their start"
            )
    left = {kind: [line for line in lines[_FIRST_OFFSET:] if _kind(line) == kind] for kind in {*kinds, *wanted}}
    fitted = [left[kind].pop(0) if left[kind] else _NOTHING for kind in wanted]
    return b"\n".join((*lines[:_FIRST_OFFSET], *fitted))


def _check_numbered(lines: Sequence[bytes], wanted: Sequence[str]) -> None:
    """Refuse other sources where Spark has written each one's number in front of its offset, and lets any be missing.

    Raises:
        Invalid: It would give one's offset to another, and read a third from its start.
    """
    numbered = [line.partition(b":") for line in lines]
    if not all(number.isdigit() for number, _, _ in numbered):
        return  # sources of names, by which Spark finds them
    kinds = {int(number): _kind(line) for number, _, line in numbered if line != _NOTHING}
    given = [kinds.get(at, "" if name.startswith(_INITIAL) else name) for at, name in enumerate(wanted)]
    if given != list(wanted) or max(kinds, default=-1) >= len(wanted):
        raise Invalid(
            f"the offsets of this query are of {_said([kinds[at] for at in sorted(kinds)])}, and it has "
            f"{_said(wanted)} now; they are of spark.sql.streaming.offsetLog.formatVersion=2, with which event time, "
            "tick= and initialState can neither come in front of a source nor go: take the sources as they were, or "
            "begin a new location with a savepoint (restore_from=)"
        )


def _kind(line: bytes) -> str:
    """Return the name of the source of ours whose offset this is; empty for another one's."""
    try:
        offset = json.loads(line)
    except ValueError:  # an offset of a source of the user's is any text
        return ""
    # Ours are numbers: a topic of Kafka's may have such a name, too.
    found = offset.items() if isinstance(offset, dict) else ()
    return next((name for name, value in found if _is_ours(name) and isinstance(value, int)), "")


def _is_ours(source: str) -> bool:
    return source in (WATERMARKS, TICKS) or source.startswith(_INITIAL)


def _places(kinds: Sequence[str]) -> list[int]:
    return [place for place, kind in enumerate(kinds) if not kind]


def _said(kinds: Sequence[str]) -> str:
    return f"[{', '.join(kind or 'a source' for kind in kinds)}]"
