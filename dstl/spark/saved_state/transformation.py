"""A savepoint made of another one: rows of its states changed by the user, its key groups made more or fewer."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import replace

from py4j.protocol import Py4JJavaError  # type: ignore[import-untyped]
from pyspark.errors import PySparkException
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import IntegralType, StructType

from dstl.checkpoint.report import SavepointReport
from dstl.checkpoint.savepoint.creation import SavepointFileWriter, copy_key_groups, write_savepoint
from dstl.checkpoint.savepoint.format import Savepoint, SavepointObjects, parse_savepoint_location, savepoint_location
from dstl.checkpoint.savepoint.restore import savepoint_as_checkpoint
from dstl.errors import Invalid, brief
from dstl.options import S3Options, SealingOptions
from dstl.runtime import IoLoop, Runtime, system_runtime
from dstl.spark.application.session import session_of
from dstl.spark.cause import cause, reason
from dstl.spark.operators.arguments import count_within
from dstl.spark.query.placement import key_group_of, placing_columns
from dstl.spark.saved_state.entries import ENDS, GROUP, KEY, USER_KEY, VALUE, PackedOperator, StateFrame, pack
from dstl.spark.saved_state.frame import EXPIRY, POSITION, frame_schema, shown_schema
from dstl.spark.saved_state.operator_rows import PLACED, EntryReader, SavedOperator, StateDecoder
from dstl.spark.saved_state.reader import find_state, state_columns
from dstl.state.codec.key_codec import KeyCodec
from dstl.state.codec.stored_schema import schema_to_json
from dstl.state.codec.value_columns import ValueColumns
from dstl.state.descriptor import StateDescriptor, StateKind
from dstl.state.frames.row_writer import arrow_schema_of
from dstl.state.processor_errors import raised_by
from dstl.state.registry import StateRegistry
from dstl.store import open_store
from dstl.store.base import ObjectStore
from dstl.store.location import shared_location
from handles.checkpoint import OperatorEntry
from handles.key_group import MAX_MAX_PARALLELISM

Transform = Callable[[DataFrame], DataFrame]
"""Returns the rows that a state is to have, given those that it has."""


def transform_savepoint(
    savepoint: str | os.PathLike[str],
    target: str | os.PathLike[str],
    states: Mapping[str, Mapping[str, Transform]] | None = None,
    *,
    max_parallelism: int | None = None,
    spark: SparkSession | None = None,
    s3: S3Options | None = None,
    sealing: SealingOptions | None = None,
) -> SavepointReport:
    """Make a savepoint of another one with other rows in some of its states, or another number of key groups.

    ::

        def in_cents(rows):
            return rows.withColumn("value", F.struct((F.col("value.total") * 100).alias("total")))

        transform_savepoint(
            "state/savepoints/old", "state/savepoints/new", {"visits": {"total": in_cents}}, max_parallelism=512
        )

    Each function gets the rows of one state, as ``StateBackend.read_state`` returns them, and returns a DataFrame with
    the same columns: ``key``, ``user_key`` of a map or broadcast state, ``position`` of an element in its list, from 0
    on, and ``value``; ``expiry_ms`` of a timer, and in a state with a time to live, where null is for ever. Expired
    rows that no sweep has dropped yet are among them. Rows may be left out, added and have other keys; the values'
    types may be others, and nothing is known of earlier schemas then. The key's types stay as they are. All other
    states are copied.

    Spark's tasks read the operators concerned, once for each state that is named and once for the rest, with their own
    access to the store. The driver writes them, and copies the others.

    Args:
        savepoint: ``LOCATION/savepoints/NAME``: what is read, and stays as it is.
        target: ``LOCATION/savepoints/NAME`` of the new one, in the same location or another.
        states: The functions, by operator and state; ``$timers`` for the timers.
        max_parallelism: Key groups of the new savepoint, and of the ``StateBackend`` that starts from it. None: as many
            as there are.
        spark: The session; the active one by default.
        s3: For savepoints in S3.
        sealing: For locations whose objects are sealed.

    Returns:
        The new savepoint's figures; their ``location`` is what ``restore_from`` takes.

    Raises:
        Invalid: No such operator or state; columns or types that the state cannot have; a null key or value, or two
            rows with one key; a function raised (``UserCodeError``). Nothing was written.
        MissingState: There is no such savepoint.
        CorruptData: It is damaged.
        ObjectExists: The target is taken.
    """
    session, runtime = session_of(spark), system_runtime()
    started = runtime.clock.now()
    (where, name), (new_where, new_name) = map(parse_savepoint_location, (savepoint, target))
    where, new_where = shared_location(where), shared_location(new_where)
    if max_parallelism is not None:
        max_parallelism = count_within("max_parallelism", max_parallelism, MAX_MAX_PARALLELISM)
    s3 = s3 or S3Options()
    loop, stores = IoLoop("dstl-transformation"), [open_store(each, s3, sealing) for each in (where, new_where)]
    with loop.closing(*stores):
        found = loop.run(_load(stores[0], runtime, name))
        plan = _Plan(session, where, found, max_parallelism or found.max_parallelism, s3, sealing)
        for uid, changes in (states or {}).items():
            for state, change in changes.items():
                plan.change(uid, state, change)
        try:
            made = loop.run(_write(stores[0], stores[1], runtime, new_name, plan))
        except (PySparkException, Py4JJavaError) as error:
            known = cause(error)
            if known is not None:
                raise known from error
            raise Invalid(f"Spark cannot make the states of {new_name!r}: {reason(error)}") from error
    location, seconds = savepoint_location(new_where, new_name), runtime.clock.now() - started
    return SavepointReport(location, made.checkpoint_id, made.batch_id, made.bytes, made.entries, seconds)


async def _load(store: ObjectStore, runtime: Runtime, name: str) -> Savepoint:
    objects = SavepointObjects(store, runtime)
    found = await objects.descriptor(name)
    if await objects.marker(name) is not None:
        raise Invalid(f"savepoint {name!r} in {store.location} was claimed or is being deleted: use another one")
    return found


class _Plan:
    """The operators of the new savepoint."""

    def __init__(
        self,
        session: SparkSession,
        location: str,
        savepoint: Savepoint,
        max_parallelism: int,
        s3: S3Options,
        sealing: SealingOptions | None,
    ) -> None:
        self._session, self._location, self._access = session, location, (s3, sealing)
        self.savepoint = savepoint
        self.max_parallelism = max_parallelism
        self._checkpoint = savepoint_as_checkpoint(savepoint)
        self._changed: dict[str, dict[str, tuple[StateDescriptor, DataFrame]]] = {}

    def change(self, uid: str, state: str, transform: Transform) -> None:
        """Take the rows that a state is to have.

        Raises:
            Invalid: There is no such state, or it cannot have such rows.
        """
        registry, descriptor = find_state(self._checkpoint, uid, state)
        what = f"state {state!r} of operator {uid!r}"
        if not callable(transform):
            raise Invalid(f"{what}: {brief(transform)} is no function of a DataFrame")
        columns = state_columns(self._checkpoint, uid, state)
        for part in (columns.key, columns.user_key, columns.value):
            arrow_schema_of(part or StructType(), what)
        schema = frame_schema(
            columns, has_position=descriptor.kind is StateKind.LIST, has_expiry=bool(descriptor.ttl_ms)
        )
        decoder = StateDecoder(self._saved(uid), descriptor, registry.key_schema, schema)
        rows = self._read(uid, decoder)
        if KEY in schema.names:
            rows = rows.withColumn(KEY, self._checked(registry, rows[KEY], rows[GROUP], rows[KEY]))
        try:
            made = transform(rows.drop(GROUP))
        except Exception as error:
            raise cause(error) or raised_by(f"{what}: its function", error) from error
        descriptor, frame = self._frame(what, registry, descriptor, schema, made)
        self._changed.setdefault(uid, {})[state] = descriptor, frame.entries(descriptor)

    def unchanged(self) -> list[OperatorEntry]:
        """Return the operators that are copied as they are."""
        if self.max_parallelism != self.savepoint.max_parallelism:
            return []
        return [entry for entry in self.savepoint.operators if entry.uid not in self._changed]

    def made(self) -> list[PackedOperator]:
        """Return the operators that Spark makes."""
        copied = {entry.uid for entry in self.unchanged()}
        return [self._made(entry) for entry in self.savepoint.operators if entry.uid not in copied]

    def _made(self, entry: OperatorEntry) -> PackedOperator:
        registry, changed = StateRegistry.from_wire(entry.registry), self._changed.get(entry.uid, {})
        is_rekeyed = self.max_parallelism != self.savepoint.max_parallelism
        if is_rekeyed:
            arrow_schema_of(registry.key_schema, f"the key of operator {entry.uid!r}")
        left_out = [descriptor.state_id for descriptor, _ in changed.values()]
        reader = EntryReader(self._saved(entry.uid), registry, left_out, with_keys=is_rekeyed)
        others = self._read(entry.uid, reader)
        if is_rekeyed:
            group = self._checked(registry, others[PLACED], others[GROUP], self._group(registry, others[PLACED]))
            placed = F.when(others[PLACED].isNull(), others[GROUP]).otherwise(group)
            others = others.withColumn(GROUP, placed).drop(PLACED)
        described = [changed[each.name][0] if each.name in changed else each for each in registry.descriptors]
        stored = {**entry.registry, "states": [each.to_wire() for each in described]}
        parallelism = min(entry.parallelism, self.max_parallelism)
        names = {each.state_id: each.name for each in described}
        return PackedOperator(
            entry.model_copy(update={"registry": stored, "parallelism": parallelism}),
            pack([others, *(entries for _, entries in changed.values())], names, self.max_parallelism),
        )

    def _saved(self, uid: str) -> SavedOperator:
        alone = savepoint_as_checkpoint(
            self.savepoint, operators=[entry for entry in self.savepoint.operators if entry.uid == uid]
        )
        return SavedOperator(self._location, alone, *self._access)

    def _read(self, uid: str, reader: StateDecoder | EntryReader) -> DataFrame:
        tasks = len(self._saved(uid).chunks)
        return self._session.range(0, tasks, 1, tasks).mapInArrow(reader, reader.schema)

    def _group(self, registry: StateRegistry, key: Column) -> Column:
        return key_group_of([key.getField(name) for name in placing_columns(registry)], self.max_parallelism)

    def _checked(self, registry: StateRegistry, key: Column, group: Column, then: Column) -> Column:
        """Return a column, once it is known that a key lies in the group that its columns place it in."""
        placing = [key.getField(name) for name in placing_columns(registry)]
        is_right = key_group_of(placing, self.savepoint.max_parallelism) == group
        wrong = F.concat(F.lit("key group "), group.cast("string"), F.lit(" has a key of another one"))
        return F.when(is_right, then).otherwise(F.coalesce(F.raise_error(wrong), then))

    def _frame(
        self, what: str, registry: StateRegistry, before: StateDescriptor, schema: StructType, made: object
    ) -> tuple[StateDescriptor, StateFrame]:
        """Return the descriptor of a changed state, and its rows as they are encoded."""
        if not isinstance(made, DataFrame) or made.isStreaming:
            raise Invalid(f"{what}: its function returned {brief(made)}, not a DataFrame of all its rows")
        if sorted(made.columns) != sorted(schema.names):
            raise Invalid(
                f"{what}: its function returned the columns ({', '.join(made.columns)}); its rows have "
                f"({', '.join(schema.names)})"
            )
        found = made.schema
        for name in schema.names:
            kind, old = found[name].dataType, schema[name].dataType
            if name in (EXPIRY, POSITION):
                if not isinstance(kind, IntegralType):
                    raise Invalid(f"{what}: column {name} is {kind.simpleString()}, not a whole number")
            elif not isinstance(kind, StructType) or not kind.fields:
                raise Invalid(f"{what}: column {name} is {kind.simpleString()}, not a struct: F.struct(...)")
            elif name == KEY and kind.simpleString() != old.simpleString():
                raise Invalid(
                    f"{what}: its key is {kind.simpleString()}, and all states of the operator have the key "
                    f"{old.simpleString()}"
                )
        user_key, value = before.user_key, before.value_schemas[-1]
        if user_key is not None and found[USER_KEY].dataType.simpleString() != shown_schema(user_key).simpleString():
            user_key = found[USER_KEY].dataType
        if VALUE in found.names and found[VALUE].dataType.simpleString() != shown_schema(value).simpleString():
            value = found[VALUE].dataType
        assert isinstance(value, StructType)
        after = replace(
            before,
            schemas=(schema_to_json(value),),
            user_key_schema=schema_to_json(user_key) if user_key is not None else "",
        )
        if user_key is not None:
            KeyCodec(user_key, f"the user key of {what}")
        ValueColumns(before.name, [value])
        rows = made.select(*self._encoded(registry, after, schema))
        return after, StateFrame(rows, registry.key_schema, user_key, value)

    def _encoded(self, registry: StateRegistry, descriptor: StateDescriptor, schema: StructType) -> list[Column]:
        """Return the columns of :class:`StateFrame`, of those that the user has."""
        group = self._group(registry, F.col(KEY)) if KEY in schema.names else F.lit(0)
        columns = [group.alias(GROUP)]
        if KEY in schema.names:
            columns.append(F.col(KEY))
        if descriptor.kind is StateKind.TIMER:
            return [*columns, F.col(EXPIRY).cast("long").alias(USER_KEY)]
        if descriptor.kind is StateKind.LIST:
            columns.append(F.col(POSITION).cast("long").alias(USER_KEY))
        elif USER_KEY in schema.names:
            columns.append(F.col(USER_KEY))
        columns.append(F.col(VALUE))
        return [*columns, F.col(EXPIRY).cast("long").alias(ENDS)] if EXPIRY in schema.names else columns


async def _write(source: ObjectStore, target: ObjectStore, runtime: Runtime, name: str, plan: _Plan) -> Savepoint:
    savepoint, made = plan.savepoint, plan.made()
    entries = {each.entry.uid: each.entry for each in made}

    async def fill(files: SavepointFileWriter) -> None:
        unchanged = savepoint_as_checkpoint(savepoint, operators=plan.unchanged())
        if unchanged.operators:
            await copy_key_groups(unchanged, source, runtime, files)
        for each in made:
            await each.add_to(files, plan.max_parallelism)

    changes = {
        "source": source.location,
        "max_parallelism": plan.max_parallelism,
        "operators": tuple(entries.get(entry.uid, entry) for entry in savepoint.operators),
    }
    return await write_savepoint(target, runtime, name, fill, {**dict(savepoint), **changes})
