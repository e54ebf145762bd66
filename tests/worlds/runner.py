"""One operator over a memory source, batch after batch, and processors that do what their rows say."""

from dataclasses import fields
from typing import ClassVar

import pyarrow as pa
from pyspark.sql import Row
from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle, ValueState
from pyspark.sql.types import StructField, StructType

from dstl.state.processor_runner import ProcessorOperator, ProcessorRunner
from dstl.state.registry import StateRegistry
from dstl.state.task_input import TaskInput
from dstl.state.vectorised.aggregation import Aggregation
from worlds.ddl import parse_ddl, schemas_of_tests
from worlds.memory_source import MemorySource

KEY = parse_ddl("k string")
INPUT = parse_ddl("k string, op string, n long")
OUTPUT = parse_ddl("k string, what string, n long")


def group_of(key):
    return sum(map(ord, key or "")) % 8


def batches_of(rows, chunk, schema=None):
    """Rows of dicts, sorted by key (nulls first), as Arrow batches of ``chunk`` rows with the key group column."""
    rows = sorted(rows, key=lambda r: (r["k"] is not None, r["k"] or ""))
    arrow = schema or pa.schema([("k", pa.string()), ("op", pa.string()), ("n", pa.int64())])
    table = pa.Table.from_pylist(rows, arrow)
    table = table.append_column("__dstl_key_group", pa.array([group_of(r["k"]) for r in rows], pa.int32()))
    return [batch for batch in table.to_batches(max_chunksize=chunk) if batch.num_rows]


def a_runner(processor, registry, *, schemas=None, **options):
    """A runner of one processor; the options are those of the operator, and of the runner."""
    of = {field.name for field in fields(ProcessorOperator)} & options.keys()
    operator = ProcessorOperator(**{"name": "op"} | {name: options.pop(name) for name in of})
    return ProcessorRunner(processor, operator, registry, schemas or schemas_of_tests(), **options)


class Job:
    """Batch after batch of one operator over one memory source."""

    def __init__(self, processor, *, time_mode="none", style="row", output=OUTPUT, schema=INPUT, key=KEY, **more):
        self.make, self.mode, self.style, self.output, self.schema, self.key = (
            processor,
            time_mode,
            style,
            output,
            schema,
            key,
        )
        self.sizes = {name: more.pop(name) for name in ("part_bytes", "call_rows") if name in more}
        self.more = more
        self.source = MemorySource()
        self.stored = StateRegistry(key).to_wire()
        self.batch = 0
        self.runner = None
        self.parts = []

    def run(self, batches, now=1000, watermark=0, source=None):
        registry = StateRegistry.from_wire(self.stored)
        what = {"key_schema": self.key, "input_schema": self.schema, "output_schema": self.output}
        how = {"style": self.style, "time_mode": self.mode} | self.more
        self.runner = a_runner(self.make(), registry, **what, **how)
        self.parts = []
        self.batch += 1
        task = TaskInput(
            source or self.source,
            self.parts.append,
            self.batch,
            range(8),
            now,
            watermark,
            **self.sizes,
        )
        out = [row for batch in self.runner.run(iter(batches), task) for row in batch.to_pylist()]
        for part in self.parts:
            self.source.apply(part)
        self.stored = registry.to_wire()
        return out

    def ids(self):
        return {s["name"]: s["id"] for s in self.stored["states"]}


class Script(StatefulProcessor):
    """Does what its rows say, with every kind of state, and yields what it sees."""

    def init(self, handle):
        self.handle = handle
        self.value = handle.getValueState("value", "n long, s string")
        self.fixed = handle.getValueState("fixed", "n long")
        self.list = handle.getListState("list", "n long")
        self.map = handle.getMapState("map", "u long", "n long")
        self.timed = False

    def handleInputRows(self, key, rows, timerValues):
        for row in rows:
            yield from self.step(key, row.op, row.n)

    def handleExpiredTimer(self, key, timerValues, expiredTimerInfo):
        yield Row(k=key[0], what="fired", n=expiredTimerInfo.getExpiryTimeInMs())
        yield Row(k=key[0], what=repr(self.value.get()), n=timerValues.getCurrentProcessingTimeInMs())
        at = expiredTimerInfo.getExpiryTimeInMs()
        if at % 3 == 0:
            self.handle.registerTimer(at + 5)
        if at % 5 == 0:
            self.list.appendValue((at,))

    def step(self, key, op, n):
        seen = None
        if op == "update":
            self.value.update((n, f"s{n}"))
            self.fixed.update((n + sum(self.fixed.get() or (0,)),))
        elif op == "clear":
            self.value.clear()
        elif op == "append":
            self.list.appendValue((n,))
        elif op == "extend":
            self.list.appendList([(n,), (n + 1,)])
        elif op == "put":
            self.list.put([(n,), (0,)])
        elif op == "clearlist":
            self.list.clear()
        elif op == "set":
            self.map.updateValue((n % 5,), (n,))
        elif op == "remove":
            self.map.removeKey((n % 5,))
        elif op == "clearmap":
            self.map.clear()
        elif op == "timer" and self.timed:
            self.handle.registerTimer(n)
        elif op == "untimer" and self.timed:
            self.handle.deleteTimer(n)
        elif op == "look":
            found = self.map.getValue((n % 5,))
            seen = (
                self.value.exists(),
                self.value.get(),
                self.fixed.get(),
                self.list.exists(),
                list(self.list.get()),
                sorted(self.map.iterator()),
                sorted(self.map.keys()),
                sorted(self.map.values()),
                self.map.containsKey((n % 5,)),
                None if found is None else tuple(found),
                list(self.handle.listTimers()) if self.timed else [],
            )
        if op == "look":
            yield Row(k=key[0], what=repr(seen), n=n)


class TimedScript(Script):
    def init(self, handle):
        super().init(handle)
        self.timed = True


OPS = ["update", "clear", "append", "extend", "put", "clearlist", "set", "set", "remove", "clearmap", "look", "look",
       "timer", "timer", "untimer"]  # fmt: skip


class Counter(StatefulProcessor):
    """Counts, and looks at the first row only when told so."""

    take = None

    def init(self, handle):
        assert isinstance(handle, StatefulProcessorHandle)
        self.n = handle.getValueState("n", "n long")
        assert isinstance(self.n, ValueState)

    def handleInputRows(self, key, rows, timerValues):
        n = (self.n.get() or (0,))[0]
        for i, _ in enumerate(rows):
            n += 1
            self.n.update((n,))
            if i + 1 == self.take:
                break
        yield Row(k=key[0], what="count", n=n)


class Seen(StatefulProcessor):
    """Keeps what it was given, for a test to look at."""

    log: ClassVar[list] = []

    def init(self, handle):
        self.handle = handle
        self.n = handle.getValueState("n", "n long")
        self.log.append("init")

    def handleInputRows(self, key, rows, timerValues):
        self.log.append((key, list(rows), timerValues))
        return iter(())

    def handleInitialState(self, key, initialState, timerValues):
        self.log.append(("initial", key, initialState))
        self.n.update((5,))

    def close(self):
        self.log.append("close")


def plain_aggregation(keys, inputs, aggregates, ttl_ms=0):
    """Return the definition of aggregates by columns of the rows, without event time, in output mode update."""
    results = [StructField(name, each.accumulator(inputs).result) for name, each in aggregates.items()]
    return Aggregation(
        mode="update",
        aggregates=aggregates,
        key_schema=keys,
        others=tuple(keys.names),
        ttl_ms=ttl_ms,
        input_schema=inputs,
        output_schema=StructType([*keys.fields, *results]),
    )
