"""Checks queries where they start: one whose batches could end without a checkpoint is refused.

PySpark has no hook for that, so ``start``, ``toTable`` and ``foreachBatch`` of its ``DataStreamWriter`` are replaced,
once in a process, when the first operator is defined. A query without an operator of ours goes straight through.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping
from typing import Any

from py4j.protocol import Py4JError  # type: ignore[import-untyped]
from pyspark.sql import DataFrame
from pyspark.sql.streaming import DataStreamWriter

from dstl.errors import Invalid
from dstl.spark.query.foreach_batch import Checkpointed, with_checkpoint
from dstl.spark.query.plan import planned_operators

__all__ = ["check_start", "operators_of", "watch_queries"]


_backends: dict[int, tuple[weakref.ref[Checkpointed], str]] = {}
"""Backend and name of every operator of this process, by its mark in plans."""

_TRIGGERS = {
    "ContinuousTrigger": "continuous processing has no micro-batches: take another trigger than continuous=",
    "RealTimeTrigger": "the real-time trigger lets rows out before their batch has its checkpoint: take another",
}
_ASYNC = "asyncprogresstrackingenabled"


def watch_queries(mark: int, backend: Checkpointed, operator: str) -> None:
    """Check the queries with this operator when they start, and complete the batches of their ``foreachBatch``."""
    for gone in [each for each, (home, _) in list(_backends.items()) if home() is None]:
        _backends.pop(gone, None)
    _backends[mark] = weakref.ref(backend), operator
    for name, replacement in (("start", _check_before), ("toTable", _check_before), ("foreachBatch", _complete_after)):
        original = getattr(DataStreamWriter, name)
        if not hasattr(original, "__dstl_original__"):
            replaced = functools.wraps(original)(replacement(original))
            replaced.__dict__["__dstl_original__"] = original
            setattr(DataStreamWriter, name, replaced)


def operators_of(df: DataFrame) -> dict[Checkpointed, list[str]]:
    """Return the backends that have operators in a streaming DataFrame, and the names of those operators."""
    found: dict[Checkpointed, list[str]] = {}
    for each in planned_operators(df) if _backends else ():
        home, operator = _backends.get(each.mark, (None, ""))
        backend = home() if home is not None else None
        if backend is not None and operator not in found.setdefault(backend, []):
            found[backend].append(operator)
    return found


def check_start(df: DataFrame, trigger: str, options: Mapping[str, Any]) -> None:
    """Refuse to start a query whose batches could end without a checkpoint.

    Args:
        df: What the query writes.
        trigger: Class of Spark's trigger.
        options: The writer's options, names in lower case.

    Raises:
        Invalid: Says which operator, or which setting, and what to do.
    """
    found = operators_of(df)
    if not found:
        return
    names = ", ".join(repr(name) for names in found.values() for name in names)
    if trigger in _TRIGGERS:
        raise Invalid(f"the query runs operator {names} of DSTL, and {_TRIGGERS[trigger]}")
    if str(options.get(_ASYNC, "false")).lower() == "true":
        raise Invalid(
            f"the query runs operator {names} of DSTL, and asyncProgressTrackingEnabled lets Spark forget which "
            "batches are done, so that a restart would repeat what the state has already seen: leave the option out"
        )
    for backend, held in found.items():
        unread = [name for name in backend.operators if name not in held]
        if unread:
            raise Invalid(
                f"the query does not read operator {unread[0]!r}, which {backend.location} has too, so no batch would "
                "ever have a checkpoint: define what the query writes and nothing else, or write the results of all "
                "operators in one query (a union, say)"
            )
    for each in planned_operators(df):
        if each.limited and each.mark in _backends:
            raise Invalid(
                f"a limit() stands behind operator {_backends[each.mark][1]!r} and would end its tasks before they are "
                "through: limit in foreachBatch instead"
            )


def _check_before(original: Callable[..., Any]) -> Callable[..., Any]:
    def start(self: DataStreamWriter, *args: Any, **options: Any) -> Any:
        df = self._df
        if _backends:
            given = {name.lower(): value for name, value in options.items() if value is not None}
            check_start(df, _trigger_of(self), {**_options_of(self), **given})
        return original(self, *args, **options)

    return start


def _complete_after(original: Callable[..., Any]) -> Callable[..., Any]:
    def foreach_batch(self: DataStreamWriter, func: Any) -> Any:
        if callable(func) and _backends:
            homes = [weakref.ref(backend) for backend in operators_of(self._df)]
            if homes:
                func = with_checkpoint(func, lambda: [b for b in (home() for home in homes) if b is not None])
        return original(self, func)

    return foreach_batch


def _trigger_of(writer: DataStreamWriter) -> str:
    trigger = _private(writer, "trigger")
    return str(trigger.getClass().getSimpleName()) if trigger is not None else ""


def _options_of(writer: DataStreamWriter) -> dict[str, Any]:
    options = _private(writer, "extraOptions")
    if options is None:
        return {}
    held = options.get(_ASYNC)
    return {_ASYNC: held.get()} if held.isDefined() else {}


def _private(writer: DataStreamWriter, name: str) -> Any:
    """Return a private field of Spark's writer; None where this Spark has no such field."""
    try:
        field = writer._jwrite.getClass().getDeclaredField(name)
        field.setAccessible(True)
        return field.get(writer._jwrite)
    except Py4JError:
        return None
