"""The Spark session of a driver: its mode, its hosts, and the queries that run in it."""

from __future__ import annotations

import logging
import os
import re
import socket
import time
from collections import Counter
from collections.abc import Mapping
from typing import Any

from pyspark.sql import SparkSession

from dstl.checkpoint.fleet.resource_manager import ExecutorHosts, task_managers_of
from dstl.errors import Invalid, brief
from dstl.files.options import FileOptions
from dstl.option_sources import SECTIONS, check_option_names

_log = logging.getLogger(__name__)

_PLUGIN = "dstl.spark.DstlPlugin"
"""Without it an application has no checkpoint directories but those of its StateBackends."""

LOOPBACK = "127.0.0.1"
"""Driver, TaskManagers and tasks of a local session share a machine."""


def session_of(spark: SparkSession | None) -> SparkSession:
    """Return the session that was given, or else the active one.

    Raises:
        Invalid: There is no session, or this is not a session of this process (Spark Connect's, say).
    """
    session: object = spark if spark is not None else SparkSession.getActiveSession()
    if session is None:
        raise Invalid("there is no active Spark session: make one first, or pass spark=")
    if type(session).__module__.startswith("pyspark.sql.connect"):
        raise Invalid(
            "a session of Spark Connect has no driver in this process, and a StateBackend lives in the driver: run the "
            "program there, with spark-submit or a session made without remote()"
        )
    if not isinstance(session, SparkSession):
        raise Invalid(f"spark={brief(session)} is {type(session).__name__}, not a SparkSession")
    return session


def settings_of(session: SparkSession) -> dict[str, str]:
    """Return Spark's settings with which the application has started.

    Raises:
        Invalid: One is not an option of DSTL; or the session sets one after the start, when it is no longer read.
    """
    settings = dict(session.sparkContext.getConf().getAll())
    check_option_names(os.environ, settings)
    for name, value in sorted(session.conf.getAll.items()):
        if name.startswith("spark.dstl.") and settings.get(name) != value:
            section = name.split(".")[2]
            argument = f"; or give {section}= to the StateBackend" if section in SECTIONS else ""
            raise Invalid(
                f"{name}={value} is set in a session of a running application, where it changes nothing: set it before "
                f"the application starts, in its first SparkSession.builder or with spark-submit --conf{argument}"
            )
    return settings


def file_options_of(settings: Mapping[str, str]) -> FileOptions:
    """Return when a batch of a StateBackend waits for its record.

    Args:
        settings: Of the application.

    Raises:
        Invalid: A value is not one of its option's; or an option is set that changes nothing for a StateBackend, in an
            application that has nothing else. Where it has, that is logged.
    """
    found = FileOptions.of(settings)
    for name in ("durability", "also"):
        if getattr(found, name) != FileOptions.model_fields[name].default:
            said = (
                f"spark.dstl.{name}={settings[f'spark.dstl.{name}']} changes nothing for a StateBackend: it is of "
                "queries of Spark's own operators on dstl:// directories"
            )
            if _PLUGIN not in re.split(r"\s*,\s*", settings.get("spark.plugins", "")):
                raise Invalid(f"{said}, and without spark.plugins={_PLUGIN} there are none; leave it out")
            _log.warning("%s", said)
    return found


def is_local(session: SparkSession) -> bool:
    """Return whether tasks run in this very process: in every other mode (``local-cluster`` too) executors do it."""
    return re.match(r"local(\[|$)", session.sparkContext.master) is not None


def driver_host(session: SparkSession) -> str:
    """Return the address at which executors reach this driver."""
    host: str = session.conf.get("spark.driver.host") or socket.gethostname()
    return host


def executor_hosts(session: SparkSession) -> ExecutorHosts:
    """Return the number of hosts on which the application has executors, and when the last one came."""
    executors = session.sparkContext._jsc.sc().statusStore().executorList(True)
    slots: Counter[str] = Counter()
    latest_ms = 0
    for index in range(executors.length()):
        executor = executors.apply(index)
        if executor.id() != "driver":
            slots[executor.hostPort().rpartition(":")[0]] += int(executor.maxTasks())
            latest_ms = max(latest_ms, executor.addTime().getTime())
    return ExecutorHosts(len(slots), time.time() - latest_ms / 1000, tuple(slots.values()))


def local_slots(master: str, cores: int) -> int:
    """Return how many tasks a ``local`` master runs at once on a machine with this many cores."""
    found = re.fullmatch(r"local\[\s*(\*|\d+)\s*(?:,[^]]*)?\]", master)
    if found is None:
        return 1
    return cores if found[1] == "*" else int(found[1])


def local_task_managers(session: SparkSession, most: int) -> int:
    """Return how many TaskManagers a local application has by default: at most one for each key group."""
    return min(most, task_managers_of(local_slots(session.sparkContext.master, os.cpu_count() or 1)))


def active_query(session: SparkSession, query_id: str) -> Any:
    """Return Spark's execution of a query that this driver runs, of whatever session; None where it runs no longer."""
    jvm: Any = session._jvm
    return session._jsparkSession.sharedState().activeStreamingQueries().get(jvm.java.util.UUID.fromString(query_id))


def query_of_run(session: SparkSession, run_id: str) -> Any:
    """Return Spark's execution of a run of a query; None where it is over."""
    found = session._jsparkSession.sharedState().activeStreamingQueries().values()
    return next((each for each in found if str(each.runId().toString()) == run_id), None)
