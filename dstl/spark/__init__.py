"""DSTL for PySpark: ``StateBackend`` in the driver, and the task that runs in a Python worker.

Names are loaded when they are first used: every Python worker imports this package to find its task function, and what
only a driver needs would cost it half a second.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from dstl.errors import Invalid

# Imported at once: a later import of the module would take the place of the function of the same name.
from dstl.spark.cause import cause

if TYPE_CHECKING:
    from dstl.spark.application.driver_jar import jar_path
    from dstl.spark.backend import StateBackend
    from dstl.spark.migration.savepoint import migrate_state
    from dstl.spark.query.batch_stamp import batch_stamp
    from dstl.spark.saved_state.transformation import transform_savepoint

__all__ = ["StateBackend", "batch_stamp", "cause", "jar_path", "migrate_state", "transform_savepoint"]

_MODULES = {
    "StateBackend": "dstl.spark.backend",
    "batch_stamp": "dstl.spark.query.batch_stamp",
    "jar_path": "dstl.spark.application.driver_jar",
    "migrate_state": "dstl.spark.migration.savepoint",
    "transform_savepoint": "dstl.spark.saved_state.transformation",
}
_NEEDED = {"numpy", "pandas", "pyarrow", "pyspark"}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        try:
            return getattr(import_module(_MODULES[name]), name)
        except ModuleNotFoundError as error:
            missing = (error.name or "").partition(".")[0]
            if missing not in _NEEDED:
                raise
            raise Invalid(f"dstl.spark needs {missing}: pip install 'dstl-pyspark[spark]'") from error
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
