"""Deduplication with event time, without Spark: batch by batch against a plain model of Spark's rules."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyspark.sql.types import LongType, StringType, StructField, StructType, TimestampType

from dstl.state.frames.row_writer import arrow_schema
from dstl.state.registry import StateRegistry
from dstl.state.task_input import TaskInput
from dstl.state.vectorised.duplicates_runner import Deduplication, DuplicatesRunner
from worlds.memory_source import MemorySource

ROWS = StructType([StructField("k", StringType()), StructField("t", TimestampType()), StructField("n", LongType())])
GROUPS, DELAY = 4, 20
Row = tuple[str | None, int | None, int]
"""Key, event time in milliseconds, a number of its own."""

KINDS = {
    "by time": Deduplication(
        input_schema=ROWS,
        columns=(("k", None), ("t", None)),
        key_schema=StructType(ROWS.fields[:2]),
        time="t",
        expires="t",
    ),
    "for ever": Deduplication(
        input_schema=ROWS, columns=(("k", None),), key_schema=StructType(ROWS.fields[:1]), time="t"
    ),
    "within": Deduplication(
        input_schema=ROWS,
        columns=(("k", None),),
        key_schema=StructType(ROWS.fields[:1]),
        time="t",
        within_us=DELAY * 1000,
    ),
}


class Model:
    """Spark's rules, a row at a time."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.seen: dict[Any, int | None] = {}
        self.watermark = self.late_watermark = self.late_rows = 0

    def batch(self, rows: list[Row]) -> list[Row]:
        passed: list[Row] = []
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


def group_of(key: str | None) -> int:
    return 3 if key is None else ord(key) % GROUPS


def batches_of(rows: list[Row]) -> list[pa.RecordBatch]:
    schema = arrow_schema(ROWS)
    times = pa.array([None if at is None else at * 1000 for _, at, _ in rows], pa.int64()).cast(schema.field(1).type)
    columns = [pa.array([key for key, _, _ in rows], pa.string()), times, pa.array([n for _, _, n in rows], pa.int64())]
    columns.append(pa.array([group_of(key) for key, _, _ in rows], pa.int32()))
    table = pa.table(columns, schema=schema.append(pa.field("__dstl_key_group", pa.int32())))
    return table.to_batches(max_chunksize=4)


@pytest.mark.parametrize("kind", KINDS)
def test_batches_are_those_of_the_rules(kind: str, seed: int) -> None:
    rng = random.Random(f"{seed}-{kind}")
    definition, model, source = KINDS[kind], Model(kind), MemorySource()
    now = number = 0
    for batch in range(40):
        now += rng.choice([0, 3, 10, 40])
        rows: list[Row] = []
        for _ in range(rng.choice([0, 2, 15])):
            at = None if rng.random() < 0.1 else max(0, now - rng.randrange(60 if rng.random() < 0.3 else 12))
            rows.append((rng.choice(["a", "b", "c", "d", "e", None]), at, number))
            number += 1
        late, mark = model.late_watermark, model.watermark
        want = model.batch(rows)
        got: list[Row] = []
        parts: list[pa.RecordBatch] = []
        late_rows = 0
        for groups in np.array_split(np.arange(GROUPS), 1 + batch % 3):
            registry = StateRegistry(definition.key_schema)
            runner = DuplicatesRunner(definition, operator="op", registry=registry)
            task = TaskInput(source, parts.append, 1, groups.tolist(), 0, mark, late)
            mine = [row for row in rows if group_of(row[0]) in groups]
            for each in runner.run(iter(batches_of(mine)), task):
                for row in each.to_pylist():
                    got.append((row["k"], None if row["t"] is None else round(row["t"].timestamp() * 1000), row["n"]))
            late_rows += runner.late_rows
        for part in parts:
            source.apply(part)
        assert sorted(got, key=repr) == want, f"batch {batch}"
        assert late_rows == model.late_rows
        assert len(source.content(0)) == len(model.seen)
