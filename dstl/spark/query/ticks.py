"""Batches without input, and partitions without rows, so that timers fire where nothing arrives.

Two things are missing in a stream that is quiet:

*A batch.* Spark makes one only when a source has something new. A *tick* is a source that has something new every so
often and never a row: its offset is the number of intervals since 1970.

*A partition's number.* A task without rows does not know which partition it is, for a union shifts its place in the
stage, by another distance in each batch. So each partition gets one row of its own, a *mark*, which never reaches the
processor. Marks belong to no source: they are there in every batch and cause none.
"""

from __future__ import annotations

import re
import time
from collections.abc import Collection, Iterator, Sequence
from typing import Any, ClassVar

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition

from dstl.errors import Invalid, brief
from dstl.state.keyed_batch import KEY_GROUP_COLUMN

try:
    from pyspark.sql.streaming.datasource import SupportsTriggerAvailableNow as SupportsTriggerAvailableNow
except ImportError:  # before Spark 4.2: such a query then takes everything that is there in one batch
    SupportsTriggerAvailableNow = object

TICKS, ONCE = "dstl_ticks", "dstl_once"
"""The names of the sources, with which the names of their offsets begin."""
_BATCH_ROWS = "spark.sql.execution.arrow.maxRecordsPerBatch"
_UNITS = {"millisecond": 1, "ms": 1, "second": 1000, "s": 1000, "minute": 60_000, "min": 60_000, "hour": 3_600_000}
"""Milliseconds of each unit, as Spark's intervals name them."""


class QuietReader(DataSourceStreamReader, SupportsTriggerAvailableNow):  # type: ignore[misc]
    """The reader of a source that has new offsets, and no rows."""

    def partitions(self, start: dict[str, int], end: dict[str, int]) -> Sequence[InputPartition]:
        """Return no partition."""
        return []

    def read(self, partition: InputPartition) -> Iterator[tuple[int]]:
        """Return no row."""
        return iter(())

    def commit(self, end: dict[str, int]) -> None:
        """Keep nothing, so that there is nothing to let go."""


class OurSource(DataSource):  # type: ignore[misc]
    """A streaming source with one integer column."""

    NAME: ClassVar[str]
    COLUMN: ClassVar[str] = "offset"

    @classmethod
    def name(cls) -> str:
        """Return the format's name for ``spark.readStream``."""
        return cls.NAME

    def schema(self) -> str:
        """Return the source's schema."""
        return f"{self.COLUMN} long"


class TickSource(OurSource):
    """A source without rows, driven by the clock of the driver's host.

    Options:
        interval_ms: Milliseconds between ticks, each of which is a new offset.
    """

    NAME = TICKS

    def streamReader(self, schema: Any) -> DataSourceStreamReader:
        """Return the reader of offsets and rows."""
        return _TickReader(int(self.options["interval_ms"]))


class OnceSource(OurSource):
    """A source of one row, once in the query's life: in its first batch, and whenever that runs again.

    Options:
        operator: Name of the operator that is given the row: its offset is that operator's, and no other one's.
    """

    NAME = ONCE

    def streamReader(self, schema: Any) -> DataSourceStreamReader:
        """Return the reader of the offset and the row."""
        return _OnceReader(once_of(self.options["operator"]))


class _TickReader(QuietReader):
    def __init__(self, interval: int) -> None:
        self._interval = interval
        self._last: int | None = None

    def initialOffset(self) -> dict[str, int]:
        return {TICKS: 0}

    def latestOffset(self, start: Any = None, limit: Any = None) -> dict[str, int]:
        return {TICKS: self._now() if self._last is None else self._last}

    def prepareForTriggerAvailableNow(self) -> None:
        self._last = self._now()

    def _now(self) -> int:
        return int(time.time() * 1000) // self._interval


class _OnceReader(QuietReader):
    def __init__(self, name: str) -> None:
        self._name = name

    def initialOffset(self) -> dict[str, int]:
        return {self._name: 0}

    def latestOffset(self, start: Any = None, limit: Any = None) -> dict[str, int]:
        return {self._name: 1}

    def prepareForTriggerAvailableNow(self) -> None:
        """There is one offset only."""

    def partitions(self, start: dict[str, int], end: dict[str, int]) -> Sequence[InputPartition]:
        return [InputPartition(end[self._name])]

    def read(self, partition: InputPartition) -> Iterator[tuple[int]]:
        yield (partition.value,)


def interval_ms(text: str, what: str) -> int:
    """Return the milliseconds of ``"10 seconds"`` or ``"500 ms"``.

    Args:
        text: What was given.
        what: Names the operator, for the message.

    Raises:
        Invalid: Not a number and a unit up to hours, or less than a millisecond.
    """
    found = re.fullmatch(r"\s*(\d{1,9})\s*([a-z]+)\s*", text.lower()) if isinstance(text, str) else None
    unit = _UNITS.get(found[2]) or _UNITS.get(found[2].removesuffix("s")) if found else None
    if found is None or unit is None or int(found[1]) == 0:
        raise Invalid(
            f"{what}: tick={brief(text)} is not a time between batches: write '10 seconds', '1 minute' or '500 ms'"
        )
    return int(found[1]) * unit


def with_ticks(df: DataFrame, interval: int) -> DataFrame:
    """Return the same rows from a stream that has a batch at least every ``interval`` milliseconds."""
    return with_batches_of(df, python_source(df.sparkSession, TickSource).option("interval_ms", str(interval)))


def with_batches_of(df: DataFrame, source: Any) -> DataFrame:
    """Return the same rows from a stream that also has a batch whenever a source of ours has something new.

    Args:
        df: The rows.
        source: The source's reader.
    """
    # No constant condition: Spark would see that there is nothing to read and leave the source out.
    return df.union(source.load().where(F.col(OurSource.COLUMN) < 0).select(*nulls_for(df)))


def once_of(operator: str) -> str:
    """Return the name of the offset of an operator's initial state."""
    return f"{ONCE} {operator}"


def one_row_once(session: SparkSession, operator: str) -> DataFrame:
    """Return a stream of one row in the query's first batch and none in any other, by Spark's own record of offsets.

    Args:
        session: The query's session.
        operator: Name of the operator that is given the row.
    """
    return python_source(session, OnceSource).option("operator", operator).load()


def with_marks(df: DataFrame, partitions: int) -> DataFrame:
    """Return the same rows and one mark for each partition: a key group below zero, every other column null.

    Raises:
        Invalid: This Spark has no way to make them.
    """
    session = df.sparkSession
    numbers = session.range(0, partitions, 1, 1).select(F.expr("cast(-1 - id as int)").alias(KEY_GROUP_COLUMN))
    try:
        # Spark refuses the union of a stream and a batch frame. What foreachBatch is given is a frame of this kind:
        # rows that belong to no source, and yet to a stream.
        rows = numbers._jdf.queryExecution().toRdd()
        made = session._jsparkSession.internalCreateDataFrame(rows, numbers._jdf.schema(), True)
    except Exception as error:
        raise Invalid(f"timers and initial state are not available with Spark {session.version}: {error}") from error
    return df.union(DataFrame(made, session).select(*nulls_for(df, (KEY_GROUP_COLUMN,))))


def python_source(session: SparkSession, source: type[OurSource]) -> Any:
    """Return the reader of a stream of one of our sources.

    Raises:
        Invalid: Arrow batches have no limit of rows in this session: Spark runs no source in Python then.
    """
    if int(session.conf.get(_BATCH_ROWS, "1")) <= 0:
        raise Invalid(
            f"{_BATCH_ROWS}={session.conf.get(_BATCH_ROWS)}: with no limit Spark runs no source in Python, and ticks, "
            "initial state and the batches of event time come from one: set it to 2147483647, in effect no limit"
        )
    session.dataSource.register(source)
    return session.readStream.format(source.name())


def nulls_for(df: DataFrame, kept: Collection[str] = ()) -> list[Any]:
    """Return a null for each column of a frame, but for columns that are kept, for a union with the frame."""
    return [
        F.col(field.name) if field.name in kept else F.lit(None).cast(field.dataType).alias(field.name)
        for field in df.schema.fields
    ]
