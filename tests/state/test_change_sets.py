"""A task's change set is the same in whatever order its rows come and in whatever parts it is sent."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import Row
from pyspark.sql.streaming.stateful_processor import StatefulProcessor

from dstl.changelog.change_set import digest_changes
from dstl.spark.operators.grouping import group_rows
from dstl.state.processor_runner import ProcessorOperator, ProcessorRunner
from dstl.state.registry import StateRegistry
from dstl.state.task_input import TaskInput
from dstl.state.vectorised.aggregation import Aggregate
from dstl.state.vectorised.aggregation_runner import AggregationRunner
from worlds.ddl import parse_ddl, schemas_of_tests
from worlds.memory_source import MemorySource
from worlds.runner import plain_aggregation

KEY = parse_ddl("k double")
INPUT = parse_ddl("k double, n long, x double")
NAN = float("nan")
Rows = list[dict[str, Any]]


class Sets(StatefulProcessor):
    """Its states depend on which rows a key has, and not on their order; timers fire for some keys."""

    def init(self, handle: Any) -> None:
        self.handle = handle
        self.total = handle.getValueState("total", "n long")
        self.seen = handle.getMapState("seen", "n long", "s string")
        self.fired = handle.getListState("fired", "at long")
        self.rows = handle.getListState("rows", "one long")

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        for row in rows:
            self.total.update(((self.total.get() or (0,))[0] + row.n,))
            self.seen.updateValue((row.n,), ("s" * (row.n % 40),))
            self.rows.appendValue((1,))
            self.handle.registerTimer(1000 + 7 * row.n)
            yield Row(k=key[0])

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Row]:
        at = expiredTimerInfo.getExpiryTimeInMs()
        self.fired.appendValue((at,))
        self.rows.put([(1,)] * (at % 3))
        self.total.update(((self.total.get() or (0,))[0] * 2,))
        self.seen.removeKey(((at - 1000) // 7,))
        if at % 2:
            self.handle.registerTimer(at - 1)
        yield Row(k=key[0])

    def close(self) -> None:
        pass


def processors(registry: StateRegistry) -> tuple[Any, Callable[[Any], Any]]:
    runner = ProcessorRunner(
        Sets(),
        ProcessorOperator(name="op", key_schema=KEY, input_schema=INPUT, output_schema=KEY, time_mode="processingTime"),
        registry,
        schemas_of_tests(),
    )
    return runner, lambda batches: group_rows(batches, ["k"], rows_per_batch=5)


def aggregates(registry: StateRegistry) -> tuple[Any, Callable[[Any], Any]]:
    made = {"n": Aggregate("count"), "total": Aggregate("sum", "n")}
    made |= {f"{name}_x": Aggregate(name, "x") for name in ("min", "max", "sum", "mean", "approx_count_distinct")}
    whole = plain_aggregation(KEY, INPUT, made)
    return AggregationRunner(whole, operator="op", registry=registry), iter


def table_of(rows: Rows, schema: pa.Schema) -> pa.Table:
    groups = [0 if row["k"] is None or row["k"] != row["k"] else int(row["k"]) % 8 for row in rows]
    return pa.Table.from_pylist(rows, schema).append_column("__dstl_key_group", pa.array(groups, pa.int32()))


def random_rows(rng: random.Random) -> Rows:
    """Keys and values with both zeros, several NaNs, infinities, and sums whose last digit depends on the order."""
    keys = [0.0, -0.0, NAN, -NAN, None, *range(1, 12)]
    xs = [0.0, -0.0, NAN, -NAN, 0.1, 1e300, -1e300, 1e-300, float("inf"), None]
    rows = []
    for _ in range(rng.randrange(1, 150)):
        x = rng.choice(xs) if rng.random() < 0.3 else rng.uniform(-1, 1) * 10 ** rng.randrange(-20, 20)
        rows.append({"k": rng.choice(keys), "n": rng.randrange(40), "x": x})
    return rows


@pytest.mark.parametrize("kind", [processors, aggregates])
def test_a_change_set_knows_no_order_of_rows_and_no_parts(kind: Callable[..., Any], rng: random.Random) -> None:
    schema = pa.schema([("k", pa.float64()), ("n", pa.int64()), ("x", pa.float64())])
    for _ in range(5):
        source, stored = MemorySource(), StateRegistry(KEY).to_wire()
        for batch in range(3):
            rows = random_rows(rng)
            digests, contents = set(), set()
            for part_bytes in (8 << 20, 1, rng.randrange(1, 3000), rng.randrange(1, 3000)):
                rng.shuffle(rows)
                registry = StateRegistry.from_wire(stored)
                runner, gathered = kind(registry)
                sent: list[pa.RecordBatch] = []
                task = TaskInput(source, sent.append, batch + 1, range(8), 1000 + 100 * batch)
                task = replace(task, part_bytes=part_bytes, call_rows=40)
                list(runner.run(gathered(table_of(rows, schema).to_batches(max_chunksize=7)), task))
                digests.add(digest_changes(sent))
                contents.add(tuple(sorted(map(repr, (row for part in sent for row in part.to_pylist())))))
            assert (len(digests), len(contents)) == (1, 1)
            for part in sent:
                source.apply(part)
            stored = registry.to_wire()


def test_a_worker_keeps_no_more_of_a_change_set_than_a_part_and_what_timers_read(rng: random.Random) -> None:
    schema = pa.schema([("k", pa.float64()), ("n", pa.int64()), ("x", pa.float64())])
    rows = [{"k": float(k), "n": 39, "x": 0.0} for k in range(3000)]
    rng.shuffle(rows)
    registry, most, sent = StateRegistry(KEY), 0, 0

    def send(part: pa.RecordBatch) -> None:
        nonlocal most, sent
        sent += part.nbytes
        overlay = runner._overlay
        most = max(most, sum(map(len, overlay._values.values())) + sum(map(len, overlay._entries.values())))

    runner, gathered = processors(registry)
    # The timers of ten of them are due in this batch: they are read again at its end, and only they are kept.
    rows[:10] = [{**row, "n": 0} for row in rows[:10]]
    task = TaskInput(MemorySource(), send, 1, range(8), 1000, part_bytes=4000)
    list(runner.run(gathered(table_of(rows, schema).to_batches()), task))
    assert sent > 50 * 4000
    assert most <= 10 * 5
