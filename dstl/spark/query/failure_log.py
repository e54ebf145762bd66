"""The typed error of each failed query: a line of the log, and the last line of what an uncaught error prints.

Spark ends its own message with the query's plan, dozens of lines of it.
"""

from __future__ import annotations

import logging
import sys
import textwrap
from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import Any

from pyspark.java_gateway import ensure_callback_server_started
from pyspark.sql import SparkSession

from dstl.spark.cause import cause

_log = logging.getLogger("dstl")
_LONGEST = 500
"""Characters of a message: a few lines of a terminal. The whole of it is in the error."""
_Hook = Callable[[type[BaseException], BaseException, TracebackType | None], object]
_watched: set[str] = set()
"""Sessions, by Spark's id."""


class _FailureLog:
    """A query listener by Spark's Java interface; it reads nothing but the end of a query, so that batches pay nothing.

    PySpark's class for listeners would copy every batch's progress, field by field, from the JVM.
    """

    def onQueryStarted(self, event: Any) -> None:
        """Do nothing."""

    def onQueryProgress(self, event: Any) -> None:
        """Do nothing."""

    def onQueryIdle(self, event: Any) -> None:
        """Do nothing."""

    def onQueryTerminated(self, event: Any) -> None:
        """Log the error, if it is one of ours."""
        failure = event.exception()
        error = cause(RuntimeError(failure.get())) if failure.isDefined() else None
        if error is not None:
            _log.error("query %s has failed: %s", event.id().toString(), _in_a_line(error))

    class Java:
        """Names the Java interface for Py4J."""

        implements = ("org.apache.spark.sql.streaming.PythonStreamingQueryListener",)


def _print_last(
    print_traceback: _Hook, kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """Print an uncaught error as before, and behind it the one of ours that is inside."""
    print_traceback(kind, error, trace)
    inside = cause(error)
    if inside is not None and inside is not error:
        print(_in_a_line(inside), file=sys.stderr)


def _in_a_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {textwrap.shorten(str(error), _LONGEST, placeholder=' ...')}"


def log_failures(session: SparkSession) -> None:
    """Log the error of each query of a session that ends with one of DSTL's; once for each session.

    From the first call on, an uncaught error of Spark's with one of ours inside ends with that.
    """
    if not _watched:
        sys.excepthook = partial(_print_last, sys.excepthook)
    uid = str(session._jsparkSession.sessionUUID())
    jvm = session.sparkContext._jvm
    if uid not in _watched and jvm is not None:
        _watched.add(uid)
        ensure_callback_server_started(session.sparkContext._gateway)
        wrapper = jvm.org.apache.spark.sql.streaming.PythonStreamingQueryListenerWrapper
        session.streams._jsqm.addListener(wrapper(_FailureLog()))
