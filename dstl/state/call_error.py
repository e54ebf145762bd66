"""The error of a call that a state refuses: an error of DSTL and of PySpark at once.

A processor that catches what PySpark's states raise, and reads how its messages begin, goes on as it did there.
"""

from __future__ import annotations

from pyspark.errors import PySparkRuntimeError

from dstl.errors import Invalid

__all__ = ["StateCallError", "why_unusable"]


class StateCallError(Invalid, PySparkRuntimeError):  # type: ignore[misc]
    """A state was used where it cannot be, or given what it does not hold. Operator action: as the message says.

    Args:
        doing: What was being done, in the words that PySpark's messages begin with.
        why: Why it cannot be.
    """

    def __init__(self, doing: str, why: object) -> None:
        PySparkRuntimeError.__init__(self, f"Error {doing}: {why}")


def why_unusable(name: str, *, deleted: bool) -> str:
    """Return why a state has nothing for the current key: ``init`` has deleted it, or there is no key."""
    if deleted:
        return f"state {name!r} is deleted by the init() that declares it: leave out deleteIfExists, or its uses"
    return (
        f"state {name!r} is used where there is no grouping key: use states in handleInputRows, handleExpiredTimer "
        "and handleInitialState only, not in init, close or another thread"
    )
