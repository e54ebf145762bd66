"""A log line for each failed query: its typed error, behind all that Spark prints about it."""

from __future__ import annotations

import logging
import textwrap
from typing import Any

from pyspark.java_gateway import ensure_callback_server_started
from pyspark.sql import SparkSession

from dstl.spark.cause import cause

_log = logging.getLogger("dstl")
_LONGEST = 500
"""Characters of a message: a few lines of a terminal. The whole of it is in the error."""
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
            said = textwrap.shorten(str(error), _LONGEST, placeholder=" ...")
            _log.error("query %s has failed: %s: %s", event.id().toString(), type(error).__name__, said)

    class Java:
        """Names the Java interface for Py4J."""

        implements = ("org.apache.spark.sql.streaming.PythonStreamingQueryListener",)


def log_failures(session: SparkSession) -> None:
    """Log the error of each query of a session that ends with one of DSTL's; once for each session."""
    uid = str(session._jsparkSession.sessionUUID())
    jvm = session.sparkContext._jvm
    if uid not in _watched and jvm is not None:
        _watched.add(uid)
        ensure_callback_server_started(session.sparkContext._gateway)
        wrapper = jvm.org.apache.spark.sql.streaming.PythonStreamingQueryListenerWrapper
        session.streams._jsqm.addListener(wrapper(_FailureLog()))
