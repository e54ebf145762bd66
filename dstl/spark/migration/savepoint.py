"""A savepoint for ``StateBackend`` out of the checkpoint of a query of ``transformWithState`` or aggregations."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import get_args

from py4j.protocol import Py4JJavaError  # type: ignore[import-untyped]
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession
from pyspark.sql.types import StructType

from dstl.checkpoint.savepoint.creation import SavepointFileWriter, write_savepoint
from dstl.checkpoint.savepoint.format import Savepoint, check_savepoint_name, savepoint_location
from dstl.errors import Invalid, brief
from dstl.options import S3Options, SealingOptions
from dstl.runtime import IoLoop, system_runtime
from dstl.spark.application.session import session_of
from dstl.spark.cause import reason
from dstl.spark.migration.aggregation import NamedAggregation, group_frame
from dstl.spark.migration.operator_reader import OperatorReader
from dstl.spark.migration.spark_operator import SparkOperator, check_aggregates, name_operators, operators_of
from dstl.spark.migration.stopped_query import Position, StoppedQuery
from dstl.spark.operators.arguments import parse_ddl
from dstl.spark.saved_state.entries import PackedOperator, StateFrame, pack
from dstl.state.descriptor import StateDescriptor, StateKind
from dstl.state.registry import TIMERS, StateRegistry
from dstl.state.vectorised.aggregation import Aggregate, AggregateStates, OutputMode
from dstl.store import open_store
from dstl.store.base import ObjectStore
from dstl.store.location import shared_location
from handles.checkpoint import OperatorEntry
from handles.operator_uid import is_operator_uid


@dataclass(frozen=True, slots=True)
class MigrationReport:
    """A state that has moved.

    Attributes:
        savepoint: What ``StateBackend(restore_from=)`` takes.
        checkpoint: The ``checkpointLocation`` to go on with; empty where none was asked for.
        query_id: Spark's query id.
        batch_id: The last batch whose effects it holds.
        watermark_ms: The watermark behind it, Unix milliseconds; None where there is none.
        operators: Each operator's name here and its states.
        entries: Entries of all states: an element of a list, an entry of a map and a timer count one each.
        bytes: Of the savepoint's files.
    """

    savepoint: str
    checkpoint: str
    query_id: str
    batch_id: int
    watermark_ms: int | None
    operators: Mapping[str, tuple[str, ...]]
    entries: int
    bytes: int


@dataclass(frozen=True, slots=True)
class _State:
    """A state of an operator, as Spark's reader has it."""

    kind: StateKind
    name: str
    frame: StateFrame
    ttl_ms: int = 0


def migrate_state(
    checkpoint: str,
    location: str | os.PathLike[str],
    *,
    name: str = "migrated",
    operators: Mapping[int, str] | None = None,
    ttl_ms: Mapping[str, int] | None = None,
    aggregates: Mapping[int, Mapping[str, str]] | None = None,
    types: Mapping[str, str] | None = None,
    keys: Mapping[int, Sequence[str]] | None = None,
    output_mode: OutputMode = "update",
    max_parallelism: int = 128,
    new_checkpoint: str = "",
    spark: SparkSession | None = None,
    s3: S3Options | None = None,
    sealing: SealingOptions | None = None,
) -> MigrationReport:
    """Make a savepoint of a stopped query's state: of PySpark's ``transformWithState``, or of Spark's aggregations.

    The old directory is only read, by Spark's own state reader; any scheme that the session knows will do, ``dstl://``
    too. Start the same processors and aggregates with ``StateBackend(location, restore_from=report.savepoint)`` and
    ``checkpointLocation`` the new checkpoint: they go on behind the last committed batch, at any parallelism.

    Args:
        checkpoint: The old query's ``checkpointLocation``.
        location: Where the savepoint goes: a directory, or ``s3://bucket/prefix``; the new backend's or another.
        name: The savepoint's name there.
        operators: ``name=`` of each operator in the new query by Spark's operator id. A single operator may go
            without: it is ``operator-1``, which it is in the new query without a name.
        ttl_ms: The time to live, in milliseconds, of each state that has one: Spark keeps no more of it than when
            values end.
        aggregates: Of each aggregation, by Spark's operator id, its aggregates by the names of their columns in the new
            query, in the old query's order: ``{0: {"n": "count()", "total": "sum(v)"}}``. Spark keeps no more of them
            than ``count`` and ``sum``, so two sums that change places are not noticed.
        types: Of aggregated columns, ``{"price": "decimal(6, 2)"}``: needed of decimals of up to 11 digits, whose sums
            Spark keeps without a point.
        keys: Names of an aggregation's grouping columns in the new query, without the window, where Spark's will not
            do: it keeps none of an expression.
        output_mode: That of the old query and the new one; of aggregations only.
        max_parallelism: Key groups of the new backend, fixed for its life.
        new_checkpoint: An empty directory of any scheme that the session knows. It gets the old one's offsets, commits
            and sources, without its state: with it the new query reads its sources on from where the old one was
            stopped. Empty: none is made, and a new query reads its sources from their start.
        spark: The session; the active one by default.
        s3: For a savepoint in S3.
        sealing: For a location whose objects are sealed.

    Returns:
        What was moved, and where to.

    Raises:
        Invalid: The query has an operator that cannot be moved (named), or an argument is missing or wrong. Nothing
            was written.
        MissingState: There is no such checkpoint.
        CorruptData: A file of Spark's is damaged.
        ObjectExists: There is such a savepoint.
    """
    check_savepoint_name(name)
    session, target = session_of(spark), shared_location(location)
    query = StoppedQuery(session, checkpoint)
    position = query.position()
    query.check_name()
    found = operators_of(query.location, _rows(session, "state-metadata", query.location))
    names = name_operators(query.location, found, operators or {}, ttl_ms or {})
    given = {column: parse_ddl(f"c {kind}")["c"].dataType for column, kind in (types or {}).items()}
    check_aggregates(query.location, found, aggregates or {}, keys or {})
    if output_mode not in get_args(OutputMode):
        raise Invalid(f"output mode {brief(output_mode)} is not one of {', '.join(get_args(OutputMode))}")
    wrong = sorted(each for each in names.values() if not is_operator_uid(each))
    if wrong:
        raise Invalid(f"an operator cannot be called {wrong[0]!r}: up to 64 letters, digits, '-' and '_'")
    if new_checkpoint:
        query.check_empty(new_checkpoint)
    named = {
        number: NamedAggregation(
            {name: Aggregate.of(text) for name, text in each.items()}, given, (keys or {}).get(number, ()), output_mode
        )
        for number, each in (aggregates or {}).items()
    }
    moving, moved = [], {}
    for each in found:
        reader = OperatorReader(session, query.location, position.batch_id, each.number, max_parallelism)
        try:
            if each.is_aggregation:
                groups = group_frame(reader, named[each.number])
                states = [_State(StateKind.VALUE, AggregateStates.name, groups)]
            else:
                states = _states(reader, each, ttl_ms or {})
        except (PySparkException, Py4JJavaError) as error:
            raise Invalid(f"Spark cannot read {reader}: {reason(error)}") from error
        if not states:
            raise Invalid(f"{reader} has neither states nor timers: start it anew")
        moving.append(_moving(position, each, names[each.number], states, max_parallelism))
        moved[names[each.number]] = tuple(state.name for state in states)
    store, loop = open_store(target, s3 or S3Options(), sealing), IoLoop("dstl-migration")
    with loop.closing(store):
        try:
            made = loop.run(_write(store, name, query.location, position, moving, max_parallelism))
        except (PySparkException, Py4JJavaError) as error:
            raise Invalid(f"Spark cannot read the state of {query.location}: {reason(error)}") from error
    if new_checkpoint:
        query.copy_without_state(new_checkpoint)
    return MigrationReport(
        savepoint=savepoint_location(target, name),
        checkpoint=new_checkpoint,
        query_id=position.query_id,
        batch_id=position.batch_id,
        watermark_ms=position.watermark_ms,
        operators=moved,
        entries=made.entries,
        bytes=made.bytes,
    )


def _rows(spark: SparkSession, source: str, location: str) -> list[dict[str, object]]:
    try:
        return [row.asDict() for row in spark.read.format(source).load(location).collect()]
    except (PySparkException, Py4JJavaError) as error:
        raise Invalid(f"Spark cannot read the operators of {location}: {reason(error)}") from error


def _states(reader: OperatorReader, operator: SparkOperator, ttl_ms: Mapping[str, int]) -> list[_State]:
    """Return a processor's timers and states."""
    found = [_State(StateKind.TIMER, TIMERS, reader.timers())] if operator.has_timers else []
    for state in operator.states:
        found.append(_State(state.kind, state.name, reader.state(state), ttl_ms[state.name] if state.has_ttl else 0))
    return found


def _moving(
    position: Position, operator: SparkOperator, uid: str, states: Sequence[_State], max_parallelism: int
) -> PackedOperator:
    """Return an operator's registry, and its states as base files that Spark makes when they are asked for."""
    key: StructType = states[0].frame.key
    registry = StateRegistry(key)
    described: list[tuple[StateDescriptor, StateFrame]] = [
        (registry.declare(each.name, each.kind, each.frame.value, each.frame.user_key, each.ttl_ms), each.frame)
        for each in states
    ]
    entry = OperatorEntry(
        uid=uid,
        parallelism=operator.partitions,
        key_types=",".join(field.dataType.simpleString() for field in key.fields),
        registry=registry.to_wire(),
        watermark_ms=position.watermark_ms,
    )
    parts = [frame.entries(descriptor) for descriptor, frame in described]
    names = {descriptor.state_id: descriptor.name for descriptor, _ in described}
    return PackedOperator(entry, pack(parts, names, max_parallelism))


async def _write(
    store: ObjectStore,
    name: str,
    source: str,
    position: Position,
    moving: Sequence[PackedOperator],
    max_parallelism: int,
) -> Savepoint:
    async def fill(files: SavepointFileWriter) -> None:
        for each in moving:
            await each.add_to(files, max_parallelism)

    content = {
        "source": source,
        "query_id": position.query_id,
        "checkpoint_id": 1,
        "batch_id": position.batch_id,
        "watermark_ms": position.watermark_ms,
        "late_watermark_ms": position.late_watermark_ms,
        "sequence_base": 1,
        "max_parallelism": max_parallelism,
        "operators": tuple(each.entry for each in moving),
    }
    return await write_savepoint(store, system_runtime(), name, fill, content)
