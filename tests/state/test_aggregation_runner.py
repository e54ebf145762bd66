"""Aggregations and deduplications with event time, without Spark: batch by batch as plain models have it."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyspark.sql.types import LongType, StringType, StructField, StructType, TimestampType

from dstl.errors import Invalid
from dstl.state.frames.row_writer import arrow_schema
from dstl.state.registry import StateRegistry
from dstl.state.task_input import TaskInput
from dstl.state.vectorised.aggregation import WINDOW_END, WINDOW_START, Aggregate, Aggregation, OutputMode
from dstl.state.vectorised.aggregation_runner import AggregationRunner
from dstl.state.vectorised.duplicates_runner import Deduplication, DuplicatesRunner
from dstl.state.vectorised.key_codes import Groups
from dstl.state.vectorised.session_runner import SessionRunner
from dstl.state.vectorised.time_windows import TimeWindows
from worlds.memory_source import MemorySource

MOMENT = TimestampType()
ROWS = StructType(
    [StructField("k", StringType()), StructField("t", MOMENT), StructField("e", MOMENT), StructField("v", LongType())]
)
WINDOW = StructType([StructField("start", MOMENT), StructField("end", MOMENT)])
GROUPS = 4
DELAY = 20
Row = tuple[str | None, int, int, int | None]
"""Key, event time, end of its gap, value; times in milliseconds."""
Result = tuple[str | None, int, int, int, int | None, int | None]
"""Key, window's start and end, count, sum, lowest value."""

AGGREGATES = {"n": Aggregate("count"), "total": Aggregate("sum", "v"), "low": Aggregate("min", "v")}


def aggregation(mode: OutputMode, windows: TimeWindows | None) -> Aggregation:
    names = {"n": LongType(), "total": LongType(), "low": LongType()}
    return Aggregation(
        mode=mode,
        aggregates=AGGREGATES,
        key_schema=StructType(
            [StructField(WINDOW_START, MOMENT), StructField(WINDOW_END, MOMENT), StructField("k", StringType())]
        ),
        others=("k",),
        window=1,
        windows=windows,
        session=windows is None,
        time="t",
        starts="t" if windows is None else None,
        ends="e" if windows is None else None,
        expires=WINDOW_END,
        input_schema=ROWS,
        output_schema=StructType(
            [StructField("k", StringType()), StructField("w", WINDOW), *(StructField(n, t) for n, t in names.items())]
        ),
    )


class Job:
    """One operator in some partitions, each a range of key groups; its state is what the changes leave."""

    def __init__(self, definition: Aggregation, call_rows: int) -> None:
        self.definition, self.call_rows = definition, call_rows
        self.source = MemorySource()
        self.registry = StateRegistry(definition.key_schema)
        self.watermark = self.late_watermark = 0
        self.late_rows = 0

    def batch(self, rows: list[Row], partitions: int) -> list[Result]:
        found: list[Result] = []
        latest: list[int] = []
        self.late_rows = 0
        parts: list[pa.RecordBatch] = []
        for groups in np.array_split(np.arange(GROUPS), partitions):
            mine = [row for row in rows if group_of(row[0]) in groups]
            runner = self.runner()
            task = TaskInput(
                source=self.source,
                send=parts.append,
                sequence=1,
                key_groups=groups.tolist(),
                watermark_ms=self.watermark,
                late_watermark_ms=self.late_watermark,
                call_rows=self.call_rows,
            )
            for batch in runner.run(iter(batches_of(mine)), task):
                found += (result_of(row) for row in batch.to_pylist())
            self.late_rows += runner.late_rows
            latest += [] if runner.max_event_time_ms is None else [runner.max_event_time_ms]
        for part in parts:
            self.source.apply(part)
        self.late_watermark = self.watermark
        self.watermark = max([self.watermark, *(at - DELAY for at in latest)])
        return sorted(found, key=repr)

    def runner(self) -> AggregationRunner | SessionRunner:
        self.registry = StateRegistry.from_wire(self.registry.to_wire())
        kind = SessionRunner if self.definition.session else AggregationRunner
        return kind(self.definition, operator="op", registry=self.registry)

    @property
    def held(self) -> int:
        return sum(len(self.source.content(state.state_id)) for state in self.registry.descriptors)


def group_of(key: str | None) -> int:
    return 3 if key is None else ord(key) % GROUPS


def batches_of(rows: list[Row]) -> list[pa.RecordBatch]:
    columns: list[Any] = list(zip(*rows, strict=True)) if rows else [()] * 4
    schema = arrow_schema(ROWS)
    arrays = [pa.array(columns[0], pa.string())]
    arrays += [pa.array([each * 1000 for each in columns[at]], pa.int64()).cast(schema.field(at).type) for at in (1, 2)]
    arrays += [pa.array(columns[3], pa.int64()), pa.array([group_of(key) for key in columns[0]], pa.int32())]
    table = pa.table(arrays, schema=schema.append(pa.field("__dstl_key_group", pa.int32())))
    return table.to_batches(max_chunksize=5)


def result_of(row: dict[str, Any]) -> Result:
    start, end = (round(row["w"][side].timestamp() * 1000) for side in ("start", "end"))
    return (row["k"], start, end, row["n"], row["total"], row["low"])


class Model:
    """Spark's rules, a row at a time."""

    def __init__(self, mode: OutputMode, windows: TimeWindows | None) -> None:
        self.mode, self.windows = mode, windows
        self.groups: defaultdict[tuple[str | None, int, int], list[int | None]] = defaultdict(list)
        self.watermark = self.late_watermark = 0
        self.late_rows = 0

    def batch(self, rows: list[Row]) -> list[Result]:
        late: set[Any] = set()
        touched: set[Any] = set()
        for key, at, end, value in rows:
            for group in [(key, at, end)] if self.windows is None else self.windows_of(key, at):
                if group[2] <= self.late_watermark and not (self.mode == "complete" and self.windows is not None):
                    late.add(group)
                elif self.windows is None:
                    touched.add(self.into_session(group, value))
                else:
                    self.groups[group].append(value)
                    touched.add(group)
        over = {group for group in self.groups if group[2] <= self.watermark}
        shown = {"append": over, "update": touched, "complete": set(self.groups)}[self.mode]
        found = [self.result(group) for group in shown]
        if self.mode != "complete":
            for group in over:
                del self.groups[group]
        self.late_rows = len(late)
        self.late_watermark = self.watermark
        self.watermark = max([self.watermark, *(at - DELAY for _, at, _, _ in rows)])
        return sorted(found, key=repr)

    def windows_of(self, key: str | None, at: int) -> Iterator[tuple[str | None, int, int]]:
        assert self.windows is not None
        size, slide = self.windows.size // 1000, self.windows.slide // 1000
        last = at - (at - self.windows.offset // 1000) % slide
        for start in range(last, at - size, -slide):
            yield (key, start, start + size)

    def into_session(self, piece: tuple[str | None, int, int], value: int | None) -> tuple[str | None, int, int]:
        key, start, end = piece
        values = [value]
        for group in [g for g in self.groups if g[0] == key and g[1] <= end and start <= g[2]]:
            values += self.groups.pop(group)
            start, end = min(start, group[1]), max(end, group[2])
        self.groups[key, start, end] = values
        return (key, start, end)

    def result(self, group: tuple[str | None, int, int]) -> Result:
        values = self.groups[group]
        some = [value for value in values if value is not None]
        return (*group, len(values), sum(some) if some else None, min(some, default=None))


def rows_of(rng: random.Random, now: int, gap: int) -> list[Row]:
    made: list[Row] = []
    for _ in range(rng.choice([0, 1, 6, 25])):
        at = max(0, now - (rng.randrange(200) if rng.random() < 0.3 else rng.randrange(25)))
        value = rng.choice([None, rng.randrange(-9, 9)])
        made.append((rng.choice(["a", "b", "c", "d", None]), at, at + rng.randrange(1, gap), value))
    return made


@pytest.mark.parametrize("mode", ["append", "update", "complete"])
@pytest.mark.parametrize("windows", [(30, 30, 0), (50, 10, 3), (25, 10, 0), None], ids=str)
def test_batches_are_those_of_the_rules(
    mode: OutputMode, windows: tuple[int, int, int] | None, rng: random.Random
) -> None:
    if windows is None and mode == "update":
        pytest.skip("Spark has no sessions in output mode update")
    of = None if windows is None else TimeWindows(*(each * 1000 for each in windows))
    for _ in range(2):
        job, model = Job(aggregation(mode, of), rng.choice([3, 1000])), Model(mode, of)
        now = 500
        for batch in range(25):
            now += rng.choice([0, 2, 15, 60])
            rows = rows_of(rng, now, 30)
            want = model.batch(rows)
            # Another parallelism now and then, as after a restart.
            assert job.batch(rows, 1 + batch % 3) == want, f"batch {batch}"
            assert job.late_rows == model.late_rows
            assert job.watermark == model.watermark
        # Everything ends.
        job.batch([("a", now + 1000, now + 1001, 1)], 2)
        if mode != "complete":
            job.batch([], 2)
            job.watermark = now + 5000
            job.batch([], 2)
            assert job.held == 0


@pytest.mark.parametrize(
    "function",
    [
        *("first", "last", "approx_count_distinct", "mean", "max", "count_distinct", "collect_list", "collect_set"),
        *("min_by", "max_by", "var_pop", "stddev_samp"),
    ],
)
def test_every_aggregate_merges_as_it_folds(function: str, rng: random.Random) -> None:
    """Partial accumulators of pieces of the rows, merged in their order, are that of all rows."""
    pair = StructType([StructField("c0", LongType()), StructField("c1", LongType())])
    schema = StructType([StructField("v", pair if function.endswith("_by") else LongType())])
    for ignore_nulls in (False, True):
        accumulator = Aggregate(function, "v", ignore_nulls=ignore_nulls).accumulator(schema)
        state = StructType([StructField(str(at), kind) for at, kind in enumerate(accumulator.state)])
        nothing = [pa.nulls(4, field.type) for field in arrow_schema(state)]
        values = pa.array([rng.choice([None, rng.randrange(9)]) for _ in range(60)], pa.int64())
        if function.endswith("_by"):
            values = pa.StructArray.from_arrays([pa.array(range(60)), values], ["c0", "c1"])
        codes = np.array([rng.randrange(4) for _ in range(60)])
        codes[:4] = range(4)
        whole = accumulator.finish(accumulator.fold(nothing, values, Groups(codes)))
        pieces = [accumulator.fold(nothing, values[at : at + 20], _groups(codes[at : at + 20])) for at in (0, 20, 40)]
        partial = [pa.concat_arrays(list(columns)) for columns in zip(*pieces, strict=True)]
        merged = accumulator.merge(partial, Groups(np.tile(np.arange(4), 3)))
        found, want = accumulator.finish(merged).to_pylist(), whole.to_pylist()
        assert found == (pytest.approx(want) if function in ("var_pop", "stddev_samp") else want)
        # Nothing but nulls is no value.
        none = accumulator.fold(nothing, pa.nulls(60, values.type), Groups(codes))
        assert accumulator.finish(none).to_pylist() == accumulator.finish(nothing).to_pylist()


def _groups(codes: Any) -> Groups:
    groups = Groups(codes)
    groups.count = 4
    return groups


def test_state_of_another_output_mode_is_refused() -> None:
    of = TimeWindows(30_000, 30_000)
    for mode, other in (("append", "update"), ("update", "complete"), ("complete", "append")):
        job = Job(aggregation(mode, of), 1000)  # type: ignore[arg-type]
        job.batch([("a", 1, 2, 3)], 1)
        known = {each.name: each for each in job.registry.descriptors}["aggregates"]
        aggregation(mode, of).check_known(known, "op")  # type: ignore[arg-type]
        with pytest.raises(Invalid, match=f"mode {other}, but its stored state was kept for the mode {mode}"):
            aggregation(other, of).check_known(known, "op")  # type: ignore[arg-type]


EVENTS = StructType([StructField("k", StringType()), StructField("t", TimestampType()), StructField("n", LongType())])
Event = tuple[str | None, int | None, int]
"""Key, event time in milliseconds, a number of its own."""

KINDS = {
    "by time": Deduplication(
        input_schema=EVENTS,
        columns=(("k", None), ("t", None)),
        key_schema=StructType(EVENTS.fields[:2]),
        output_schema=EVENTS,
        time="t",
        expires="t",
    ),
    "for ever": Deduplication(
        input_schema=EVENTS,
        columns=(("k", None),),
        key_schema=StructType(EVENTS.fields[:1]),
        output_schema=EVENTS,
        time="t",
    ),
    "within": Deduplication(
        input_schema=EVENTS,
        columns=(("k", None),),
        key_schema=StructType(EVENTS.fields[:1]),
        output_schema=EVENTS,
        time="t",
        within_us=DELAY * 1000,
    ),
}


class Seen:
    """Spark's rules, a row at a time."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.seen: dict[Any, int | None] = {}
        self.watermark = self.late_watermark = self.late_rows = 0

    def batch(self, rows: list[Event]) -> list[Event]:
        passed: list[Event] = []
        self.late_rows = 0
        for row in rows:
            key, at, _ = row
            if at is not None and at <= self.late_watermark:
                self.late_rows += 1
                continue
            name = (key, at) if self.kind == "by time" else key
            if name not in self.seen:
                self.seen[name] = {"by time": at, "for ever": None, "within": (at or 0) + DELAY}[self.kind]
                passed.append(row)
        self.seen = {name: end for name, end in self.seen.items() if end is None or end > self.watermark}
        self.late_watermark = self.watermark
        self.watermark = max([self.watermark, *(at - DELAY for _, at, _ in rows if at is not None)])
        return sorted(passed, key=repr)


def events_of(rows: list[Event]) -> list[pa.RecordBatch]:
    schema = arrow_schema(EVENTS)
    times = pa.array([None if at is None else at * 1000 for _, at, _ in rows], pa.int64()).cast(schema.field(1).type)
    columns = [pa.array([key for key, _, _ in rows], pa.string()), times, pa.array([n for _, _, n in rows], pa.int64())]
    columns.append(pa.array([group_of(key) for key, _, _ in rows], pa.int32()))
    table = pa.table(columns, schema=schema.append(pa.field("__dstl_key_group", pa.int32())))
    return table.to_batches(max_chunksize=4)


@pytest.mark.parametrize("kind", KINDS)
def test_what_passes_a_deduplication_is_what_the_rules_let_through(kind: str, seed: int) -> None:
    rng = random.Random(f"{seed}-{kind}")
    definition, model, source = KINDS[kind], Seen(kind), MemorySource()
    now = number = 0
    for batch in range(40):
        now += rng.choice([0, 3, 10, 40])
        rows: list[Event] = []
        for _ in range(rng.choice([0, 2, 15])):
            at = None if rng.random() < 0.1 else max(0, now - rng.randrange(60 if rng.random() < 0.3 else 12))
            rows.append((rng.choice(["a", "b", "c", "d", "e", None]), at, number))
            number += 1
        late, mark = model.late_watermark, model.watermark
        want = model.batch(rows)
        got: list[Event] = []
        parts: list[pa.RecordBatch] = []
        late_rows = 0
        for groups in np.array_split(np.arange(GROUPS), 1 + batch % 3):
            registry = StateRegistry(definition.key_schema)
            runner = DuplicatesRunner(definition, operator="op", registry=registry)
            task = TaskInput(source, parts.append, 1, groups.tolist(), 0, mark, late)
            mine = [row for row in rows if group_of(row[0]) in groups]
            for each in runner.run(iter(events_of(mine)), task):
                for row in each.to_pylist():
                    got.append((row["k"], None if row["t"] is None else round(row["t"].timestamp() * 1000), row["n"]))
            late_rows += runner.late_rows
        for part in parts:
            source.apply(part)
        assert sorted(got, key=repr) == want, f"batch {batch}"
        assert late_rows == model.late_rows
        assert len(source.content(0)) == len(model.seen)
