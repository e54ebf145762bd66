"""Checks of the Python environments of a driver and its workers, before any task runs."""

from __future__ import annotations

import functools
import importlib.util
import os
import re
import shutil
import subprocess
import sys

import pyspark
from pyspark import SparkFiles
from pyspark.sql import SparkSession

from dstl.errors import Invalid


def check_pyspark() -> None:
    """Refuse a PySpark that DSTL is not made for: before 4.1.2 its reader of schemas unpickles what they name.

    Raises:
        Invalid: It is below 4.1.2, or 5 and above.
    """
    version = tuple(int(part) for part in re.findall(r"\d+", pyspark.__version__)[:3])
    if not (4, 1, 2) <= version < (5,):
        raise Invalid(
            f"PySpark {pyspark.__version__} is too {'old' if version < (5,) else 'new'}: DSTL needs 4.1.2 or later, "
            "and below 5 (pip install -U 'dstl-pyspark[spark]')"
        )


def check_table(table: str) -> None:
    """Refuse a table kind whose library is not installed for this Python, which starts TaskManagers.

    Raises:
        Invalid: ``rocksdict`` is missing.
    """
    if table == "rocksdb" and importlib.util.find_spec("rocksdict") is None:
        raise Invalid("table='rocksdb' needs rocksdict: pip install 'dstl-pyspark[rocksdb]'")


def check_worker_python(session: SparkSession) -> None:
    """Refuse a local session whose workers' Python is missing, or has no DSTL.

    Where it is the driver's own, nothing is run.

    Raises:
        Invalid: There is no such program, it cannot import ``dstl``, or it is of another version than the driver's.
    """
    context = session.sparkContext
    program = str(context.pythonExec)
    found = shutil.which(program)
    cure = f"set PYSPARK_PYTHON={sys.executable} before the Spark session is made"
    if found is None:
        raise Invalid(f"PYSPARK_PYTHON names {program!r} for Spark's workers, and there is no such program: {cure}")
    if os.path.abspath(found) == os.path.abspath(sys.executable):
        return
    shipped = [os.path.join(SparkFiles.getRootDirectory(), name) for name in context._python_includes]
    wrong = _fault(found, (*shipped, *os.environ.get("PYTHONPATH", "").split(os.pathsep)))
    if wrong is not None:
        raise Invalid(f"Spark's workers run {found}, {wrong}: {cure}")


@functools.cache
def _fault(program: str, path: tuple[str, ...]) -> str | None:
    """Return the reason why a Python cannot be a worker's; None where it can."""
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
