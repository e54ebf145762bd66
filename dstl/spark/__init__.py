"""The Spark face: StateBackend, and the task that runs in a Python worker.

Names are loaded when they are first used: every Python worker imports this package to find its task function, and what
only a driver needs would cost it half a second.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dstl.spark.aggregates import approx_count_distinct, count, first, last, max, mean, min, sum
    from dstl.spark.backend import StateBackend

__all__ = ["StateBackend", "approx_count_distinct", "count", "first", "last", "max", "mean", "min", "sum"]

_HOMES = dict.fromkeys(__all__, "dstl.spark.aggregates") | {"StateBackend": "dstl.spark.backend"}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
