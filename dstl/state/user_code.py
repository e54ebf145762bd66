"""Errors that user code raises, told apart from ours and from those of the input."""

from __future__ import annotations

import os
import traceback
from types import TracebackType
from typing import Any

from dstl.errors import DstlError, Invalid, UserCodeError

__all__ = ["user_code_error"]

_HERE = os.path.dirname(__file__)
_MAX_TEXT = 16_000


def user_code_error(error: Exception, processor: object, operator: str, key: Any) -> Exception:
    """Return what to raise for an exception that came out of a call to user code.

    A ``DstlError`` that is nobody's mistake (a TaskManager that is gone) is returned as it is: it can be retried.
    Everything else becomes a ``UserCodeError`` with the user's own frames of the traceback, the key and the operator.
    """
    if isinstance(error, UserCodeError) or (isinstance(error, DstlError) and not isinstance(error, Invalid)):
        return error
    shown = repr(key)
    if len(shown) > 300:
        shown = shown[:300] + "..."
    where = "" if key is None else f" for key {shown}"
    lines = traceback.format_exception(type(error), error, _own_frames(error.__traceback__))
    text = "".join(lines).rstrip()[-_MAX_TEXT:]
    return UserCodeError(
        f"{type(processor).__name__} of operator {operator!r} raised {type(error).__name__}{where}: {error}\n{text}"
    )


def _own_frames(trace: TracebackType | None) -> TracebackType | None:
    """Leave out our frames above the user's first one."""
    first = trace
    while first is not None and os.path.dirname(first.tb_frame.f_code.co_filename) == _HERE:
        first = first.tb_next
    return first if first is not None else trace
