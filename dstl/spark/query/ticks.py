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
from collections.abc import Collection
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from dstl.errors import Invalid, brief
from dstl.state.keyed_batch import KEY_GROUP_COLUMN

TICKS, ONCE, WATERMARKS = "dstl_ticks", "dstl_once", "dstl_watermark"
"""The names of sources of ours; of initial state, with its operator behind it."""
QUIET = "dstl.spark.QuietSource"
"""The class of all of them, by which Spark knows them."""
_NAMED_SOURCES = "spark.sql.streaming.queryEvolution.enableSourceEvolution"
_UNITS = {"millisecond": 1, "ms": 1, "second": 1000, "s": 1000, "minute": 60_000, "min": 60_000, "hour": 3_600_000}
"""Milliseconds of each unit, as Spark's intervals name them."""


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
    return with_batches_of(df, quiet_source(df.sparkSession, TICKS, interval_ms=interval))


def with_batches_of(df: DataFrame, source: DataFrame) -> DataFrame:
    """Return the same rows from a stream that also has a batch whenever a :func:`quiet_source` has something new."""
    # No constant condition: Spark would see that there is nothing to read and leave the source out.
    return df.union(source.where("value < 0").select(*nulls_for(df)))


def once_of(operator: str) -> str:
    """Return the name of the offset of an operator's initial state."""
    return f"{ONCE} {operator}"


def one_row_once(session: SparkSession, operator: str) -> DataFrame:
    """Return a stream of one row in the query's first batch and none in any other, by Spark's own record of offsets.

    Args:
        session: The query's session.
        operator: Name of the operator that is given the row.
    """
    # Without columns: those of what it is joined with may have their names.
    return quiet_source(session, once_of(operator), rows=1).select()


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


def quiet_source(session: SparkSession, name: str, **options: object) -> DataFrame:
    """Return the stream of a source that has offsets, and no rows but for ``rows``; see ``QuietSource.java``.

    Args:
        session: The query's session.
        name: The source's name, which its offsets have, too.
        options: See there.

    Raises:
        Invalid: Spark runs no source without a name that the user has given it.
    """
    if str(session.conf.get(_NAMED_SOURCES, "false")).lower() == "true":
        raise Invalid(
            f"{_NAMED_SOURCES}=true: Spark wants each source named then, and those that event time, tick= and "
            "initialState bring have no name: set it to false"
        )
    told = {"name": name, **{option: str(value) for option, value in options.items()}}
    return DataFrame(jvm_source(session).load(session._jsparkSession, told), session)


def jvm_source(session: SparkSession) -> Any:
    """Return an object of ``QuietSource.java``, from the jar in the driver's JVM."""
    from dstl.spark.application.driver_jar import driver_roots  # pydantic with it, and workers import this module

    return driver_roots(session).getClass().getClassLoader().loadClass(QUIET).newInstance()


def nulls_for(df: DataFrame, kept: Collection[str] = ()) -> list[Any]:
    """Return a null for each column of a frame, but for columns that are kept, for a union with the frame."""
    return [
        F.col(field.name) if field.name in kept else F.lit(None).cast(field.dataType).alias(field.name)
        for field in df.schema.fields
    ]
