"""The parts of one application around its query: where the driver is, what its location is called, how it all ends."""

from __future__ import annotations

import functools
import importlib.util
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

import pyspark
from pyspark import SparkFiles
from pyspark.sql import SparkSession

from dstl.checkpoint.fleet.resource_manager import ExecutorHosts
from dstl.checkpoint.service import CoordinatorService
from dstl.errors import Invalid
from dstl.options import CheckpointOptions, MaterializationOptions
from dstl.rpc.protocol import Secret
from dstl.runtime import IoLoop
from dstl.spark.fleet_launcher import FleetLauncher
from dstl.state.registry import StateRegistry
from dstl.store.base import ObjectStore
from handles.operator_uid import is_operator_uid

__all__ = [
    "LOOPBACK",
    "check_grace",
    "check_operator_name",
    "check_pyspark",
    "check_table",
    "check_worker_python",
    "driver_host",
    "executor_hosts",
    "is_local",
    "merge_registries",
    "shared_secret",
    "shut_down",
]

LOOPBACK = "127.0.0.1"
"""Driver, TaskManagers and tasks of a local session share a machine."""


def check_pyspark() -> None:
    """Say in one sentence when PySpark is not one that DSTL is made for: ``repartitionById`` came with 4.1.

    Raises:
        Invalid: It is below 4.1, or 5 and above.
    """
    version = tuple(int(part) for part in re.findall(r"\d+", pyspark.__version__)[:2])
    if not (4, 1) <= version < (5, 0):
        raise Invalid(
            f"PySpark {pyspark.__version__} is too {'old' if version < (4, 1) else 'new'}: DSTL needs 4.1 or later, "
            "and below 5 (pip install -U 'dstl-pyspark[spark]')"
        )


def check_table(table: str) -> None:
    """Say in one sentence when what a table kind needs is not installed for this Python, which starts TaskManagers.

    Raises:
        Invalid: ``rocksdict`` is missing.
    """
    if table == "rocksdb" and importlib.util.find_spec("rocksdict") is None:
        raise Invalid("table='rocksdb' needs rocksdict: pip install 'dstl-pyspark[rocksdb]'")


def check_worker_python(session: SparkSession) -> None:
    """Say in one sentence when the Python of a local session's workers is missing, or has no DSTL.

    Where it is the driver's own, nothing is run.

    Raises:
        Invalid: There is no such program, it cannot import ``dstl``, or it is of another version than the driver's.
    """
    context = session.sparkContext
    program = str(context.pythonExec)
    found = shutil.which(program)
    cure = f"set PYSPARK_PYTHON={sys.executable} before the Spark session is made"
    if found is None:
        raise Invalid(f"Spark's workers are to run {program!r} (PYSPARK_PYTHON), and there is no such program: {cure}")
    if os.path.abspath(found) == os.path.abspath(sys.executable):
        return
    shipped = [os.path.join(SparkFiles.getRootDirectory(), name) for name in context._python_includes]
    what = _trial(found, (*shipped, *os.environ.get("PYTHONPATH", "").split(os.pathsep)))
    if what is not None:
        raise Invalid(f"Spark's workers run {found}, {what}: {cure}")


@functools.cache
def _trial(program: str, path: tuple[str, ...]) -> str | None:
    """Return what is wrong with a Python as a worker's; None where nothing is."""
    code = "import sys; import dstl.spark.task; print(*sys.version_info[:2])"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, path))}
    try:
        done = subprocess.run([program, "-c", code], env=env, capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"which cannot be started ({error})"
    if done.returncode:
        said = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        return f"which cannot import dstl ({said[-1]})"
    own, theirs = "{}.{}".format(*sys.version_info), ".".join(done.stdout.split())
    if theirs != own:
        return f"which is Python {theirs}, and the driver's is {own}"
    return None


def check_grace(checkpoints: CheckpointOptions, materialization: MaterializationOptions) -> None:
    """Refuse options with which the cleaner could take for an orphan what is about to be named.

    Raises:
        Invalid: The grace period is not longer than a commit, or a finished base, may take to be published.
    """
    for name, seconds in (
        ("checkpoints.timeout_s", checkpoints.timeout_s),
        ("materialization.publish_within_s", materialization.publish_within_s),
    ):
        if checkpoints.clean_grace_s <= seconds:
            raise Invalid(
                f"checkpoints.clean_grace_s={checkpoints.clean_grace_s:g} is not above {name}={seconds:g}: the cleaner "
                "would delete what a checkpoint is about to name; make the grace period longer"
            )


def check_operator_name(name: object) -> str:
    """Return the name if it can be an operator's: one path element of the grammar of object names.

    Raises:
        Invalid: It cannot.
    """
    if not isinstance(name, str):
        raise Invalid(f"an operator's name is a text, not {type(name).__name__}: name={str(name)[:80]!r}")
    if not is_operator_uid(name):
        raise Invalid(f"not an operator name: {name[:80]!r}; use letters, digits, '-' and '_', at most 64")
    return name


def is_local(session: SparkSession) -> bool:
    """Return whether tasks run in this very process: in every other mode (``local-cluster`` too) executors do it."""
    return re.match(r"local(\[|$)", session.sparkContext.master) is not None


def driver_host(session: SparkSession) -> str:
    """Return the address at which executors reach this driver."""
    host: str = session.conf.get("spark.driver.host") or socket.gethostname()
    return host


def executor_hosts(session: SparkSession) -> ExecutorHosts:
    """Return on how many hosts the application has executors now."""
    executors = session.sparkContext._jsc.sc().statusStore().executorList(True)
    hosts, latest_ms = set(), 0
    for index in range(executors.length()):
        executor = executors.apply(index)
        if executor.id() != "driver":
            hosts.add(executor.hostPort().rpartition(":")[0])
            latest_ms = max(latest_ms, executor.addTime().getTime())
    return ExecutorHosts(len(hosts), time.time() - latest_ms / 1000)


def active_run(session: SparkSession, query_id: str) -> str | None:
    """Return the run id of a query that this driver runs, of whatever session; None where it runs no longer.

    Tasks are not told it where the user has set a job group of their own: Spark says it by the group alone.
    """
    jvm: Any = session._jvm
    active = session._jsparkSession.sharedState().activeStreamingQueries()
    query = active.get(jvm.java.util.UUID.fromString(query_id))
    return None if query is None else str(query.runId().toString())


def shared_secret(path: str | None) -> Secret:
    """Return the secret that a file holds; without a file a new random one."""
    return Secret.generate() if path is None else Secret.from_file(path)


def merge_registries(known: Any, reported: Any) -> dict[str, Any]:
    """Return what two of an operator's state registries know together, as plain data."""
    return StateRegistry.from_wire(dict(known)).merge(StateRegistry.from_wire(dict(reported))).to_wire()


def shut_down(
    loop: IoLoop, service: CoordinatorService, launcher: FleetLauncher, stores: Sequence[ObjectStore]
) -> None:
    """End an application: the service, its stores, the loop, and then the TaskManagers, which end by themselves."""

    async def close() -> None:
        await service.close()
        for store in stores:
            await store.close()

    try:
        loop.run(close(), timeout=10)
    finally:
        loop.close()
        launcher.stop()
