"""Deduplication of a stream, checked when the query is defined."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from pyspark.sql import DataFrame
from pyspark.sql.types import StructField, StructType

from dstl.errors import Invalid, brief
from dstl.spark.operators.input_checks import MOMENTS, WATERMARK_DELAY, check_hashable, check_names, check_stream
from dstl.spark.query.plan import watermark_follows
from dstl.spark.task_definition import EventTime, OperatorPlace, TaskDefinition
from dstl.state.registry import StateRegistry
from dstl.state.vectorised.duplicates_runner import Deduplication, DuplicatesRunner


@dataclass(frozen=True, kw_only=True)
class DeduplicationDefinition(TaskDefinition):
    """An operator that lets the first row of each key pass.

    Attributes:
        operator: What tells rows apart, and how long.
    """

    operator: Deduplication

    @property
    def needs_marks(self) -> bool:
        """True where keys of a partition without rows may be forgotten."""
        return self.operator.ends

    def declare(self, registry: StateRegistry) -> StateRegistry:
        """Return the registry with the keys' state.

        Raises:
            Invalid: The stored state is that of the other kind of deduplication.
        """
        known = {each.name for each in registry.descriptors}
        made = super().declare(registry)
        held = known - {each.name for each in made.declared}
        if held:
            raise Invalid(
                f"{self.label} has the stored state {min(held)!r}, of which this deduplication knows nothing: define "
                "it as before (dropDuplicates or dropDuplicatesWithinWatermark), or give the operator another name"
            )
        return made

    def task_runner(self, registry: StateRegistry) -> DuplicatesRunner:
        """Return the runner of one task."""
        return DuplicatesRunner(self.operator, operator=self.uid, registry=registry)


def define_deduplication(
    df: DataFrame, subset: Sequence[str] | None, place: OperatorPlace, *, within_watermark: bool
) -> DeduplicationDefinition:
    """Check a deduplication and return its definition.

    Args:
        df: The input.
        subset: Columns that tell rows apart; None for all.
        place: Name and partitions; its grouping columns are not looked at.
        within_watermark: Forget a key once the watermark has passed its first row's event time by the delay.

    Raises:
        Invalid: Names the operator and what is wrong.
    """
    what = place.label
    check_stream(df, what)
    check_names(df, df.columns, place)
    names = _resolve(df, subset, what)
    marked = [field for field in df.schema.fields if WATERMARK_DELAY in (field.metadata or {})]
    if len(marked) > 1:
        raise Invalid(
            f"{what}: columns {' and '.join(repr(field.name) for field in marked)} both have a watermark: drop one"
        )
    timed = marked[0] if marked else None
    if within_watermark and (timed is None or not isinstance(timed.dataType, MOMENTS)):
        raise Invalid(
            f"{what}: dropDuplicatesWithinWatermark needs a timestamp column with a watermark: call "
            "df.withWatermark(column, delay) before, and keep the column; or take dropDuplicates"
        )
    columns: list[tuple[str, str | None]] = []
    keys: list[StructField] = []
    expires: str | None = None
    for name in names:
        field = df.schema[name]
        check_hashable(field.dataType, name, what)
        if timed is not None and name == timed.name and isinstance(field.dataType, StructType):
            kind = field.dataType
            for part in ("start", "end"):
                columns.append((name, part))
                keys.append(StructField(f"{name}_{part}", kind[part].dataType))
            expires = f"{name}_end"
        else:
            columns.append((name, None))
            keys.append(StructField(name, field.dataType))
            expires = name if timed is not None and name == timed.name else expires
    delay = int(timed.metadata[WATERMARK_DELAY]) if timed is not None else 0
    whole = Deduplication(
        input_schema=df.schema,
        columns=tuple(columns),
        key_schema=StructType(keys),
        output_schema=df.schema,
        time=timed.name if timed is not None else None,
        expires=None if within_watermark else expires,
        within_us=delay * 1000 if within_watermark else None,
    )
    definition = DeduplicationDefinition(
        **vars(replace(place, by=tuple(whole.key_schema.names))),
        placed_by=tuple(names),
        event_time=None if timed is None else EventTime(timed.name, delay, watermark_follows(df)),
        operator=whole,
    )
    definition.resolve(None)  # What a task would refuse is refused here.
    return definition


def _resolve(df: DataFrame, subset: Any, what: str) -> list[str]:
    """Return the names of the columns that tell rows apart, as the DataFrame has them."""
    if subset is None:
        return list(df.columns)
    if not isinstance(subset, (list, tuple)) or not subset or not all(isinstance(each, str) for each in subset):
        raise Invalid(f"{what}: {brief(subset)} is not a list of columns: give names, or nothing for all columns")
    exact = df.sparkSession.conf.get("spark.sql.caseSensitive") == "true"
    found = []
    for name in subset:
        same = [each for each in df.columns if each == name or (not exact and each.lower() == name.lower())]
        if not same:
            raise Invalid(f"{what}: there is no column {name!r}; there are {', '.join(df.columns)}")
        found.append(same[0])
    return list(dict.fromkeys(found))
