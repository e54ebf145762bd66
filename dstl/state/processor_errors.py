"""Errors that a processor meets: its own, told apart from ours and the input's, and those of calls a state refuses."""

from __future__ import annotations

import os
import traceback
from types import TracebackType
from typing import Any

from pyspark.errors import PySparkRuntimeError

from dstl.errors import DstlError, Invalid, UserCodeError

_MAX_TEXT = 16_000  # the last hundred lines or two of a traceback, which are the user's


class StateCallError(Invalid, PySparkRuntimeError):  # type: ignore[misc]
    """A state was used where it cannot be, or given what it does not hold. Operator action: as the message says.

    It is an error of DSTL and of PySpark at once: a processor that catches what PySpark's states raise, and reads how
    its messages begin, goes on as it did there.

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


def user_code_error(error: Exception, processor: object, operator: str, key: Any) -> Exception:
    """Return what to raise for an exception that came out of a call to user code.

    A ``DstlError`` that is not the user's mistake (a lost TaskManager) is returned as it is: it can be retried.
    Everything else becomes a ``UserCodeError`` with the user's own frames of the traceback, the key and the operator.
    """
    if isinstance(error, UserCodeError) or (isinstance(error, DstlError) and not isinstance(error, Invalid)):
        return error
    shown = repr(key)
    if len(shown) > 300:
        shown = shown[:300] + "..."
    where = "" if key is None else f" for key {shown}"
    return raised_by(f"{type(processor).__name__} of operator {operator!r}", error, where)


def raised_by(who: str, error: Exception, where: str = "") -> UserCodeError:
    """Return the error that says what somebody's code raised, with its own frames of the traceback."""
    lines = traceback.format_exception(type(error), error, _own_frames(error.__traceback__))
    text = "".join(lines).rstrip()[-_MAX_TEXT:]
    return UserCodeError(f"{who} raised {type(error).__name__}{where}: {error}\n{text}")


def _own_frames(trace: TracebackType | None) -> TracebackType | None:
    """Leave out our frames above the user's first one: those of the directory that has caught it."""
    first = trace
    while first is not None and trace is not None and _directory(first) == _directory(trace):
        first = first.tb_next
    return first if first is not None else trace


def _directory(trace: TracebackType) -> str:
    return os.path.dirname(trace.tb_frame.f_code.co_filename)
