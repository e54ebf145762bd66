"""Broadcast state without Spark: what a processor sees of it, who may write it, and in which order rows come."""

from __future__ import annotations

import datetime as dt
import random
import re
from functools import partial
from typing import Any

import pandas as pd
import pyarrow as pa
import pytest
from pyspark.errors import PySparkRuntimeError
from pyspark.sql import Row
from pyspark.sql.streaming.stateful_processor import StatefulProcessor

from dstl.changelog.change_set import digest_changes
from dstl.errors import Invalid, UserCodeError
from dstl.state.broadcast_state import (
    BROADCAST_KEY_GROUP,
    BroadcastCopies,
    BroadcastState,
    BroadcastStream,
    rows_of_streams,
)
from dstl.state.registry import StateRegistry
from dstl.state.task_input import TaskInput
from worlds.ddl import parse_ddl
from worlds.memory_source import MemorySource
from worlds.runner import INPUT, KEY, OUTPUT, a_runner, batches_of

RULES = parse_ddl("id string, least long")
STREAM = BroadcastStream("rules", "__dstl_broadcast_0", RULES)


class Rules(StatefulProcessor):
    """Answers each row with the rules that it breaks; a rule without a limit is removed, "*" stands for all."""

    def init(self, handle: Any) -> None:
        self.handle = handle
        self.rules = handle.getBroadcastState("rules")
        self.n = handle.getValueState("n", "n long")

    def handleBroadcastRows(self, name: str, rows: Any) -> None:
        assert name == "rules"
        for row in rows:
            if row.id == "*":
                self.rules.clear()
            elif row.least is None:
                self.rules.removeKey((row.id,))
            else:
                self.rules.updateValue((row.id,), row)

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Any:
        for row in rows:
            broken = sorted(rule for (rule,), (_, least) in self.rules.iterator() if row.n < least)
            yield Row(k=key[0], what=f"{row.op} {' '.join(broken)}", n=row.n)


class World:
    """Partitions of one operator over the same state, batch after batch."""

    def __init__(self, make: Any = Rules, partitions: int = 2, stream: BroadcastStream = STREAM, **more: Any) -> None:
        self.make, self.partitions, self.stream, self.more = make, partitions, stream, more
        self.source = MemorySource()
        self.stored = StateRegistry(KEY).to_wire()
        self.batch = 0
        self.copies: BroadcastCopies | None = None

    def marks(self, rules: list[Any]) -> list[pa.RecordBatch]:
        """Return the rows that one partition gets, in the order of its own shuffle, in several batches."""
        rows = [[rule] for rule in rules]
        random.shuffle(rows)
        cut = random.randrange(len(rows) + 1)
        schema = pa.struct([("id", pa.string()), ("least", pa.int64())])
        made = []
        for part in (rows[:cut], [None], rows[cut:]):
            carried = [[{"id": one[0][0], "least": one[0][1]}] if one is not None else None for one in part]
            made.append(pa.RecordBatch.from_arrays([pa.array(carried, pa.list_(schema))], [self.stream.column]))
        return made

    def run(self, rows: list[Any], rules: Any = ()) -> list[Any]:
        self.batch += 1
        out, digests, kept = [], set(), []
        for partition in range(self.partitions):
            registry = StateRegistry.from_wire(self.stored)
            what = {"key_schema": KEY, "input_schema": INPUT, "output_schema": OUTPUT, "streams": [self.stream]}
            runner = a_runner(self.make(), registry, **what | self.more)
            parts: list[pa.RecordBatch] = []
            common: list[pa.RecordBatch] = []
            mine = [row for row in rows if ord(row["k"]) % self.partitions == partition]
            task = TaskInput(
                self.source,
                parts.append,
                self.batch,
                broadcast=rows_of_streams(self.marks(list(rules)), [self.stream]) if rules else (),
                send_broadcast=common.append,
                read_broadcast=self.copies and partial(self.copies.whole, id(self), "op", self.batch),
            )
            for made in runner.run(iter(batches_of(mine, 3)), task):
                out += made.to_pylist()
            for part in common:
                assert set(part.column("key_group").to_pylist()) == {BROADCAST_KEY_GROUP}
            digests.add(digest_changes(common))
            kept.append((parts, common))
            self.stored = registry.to_wire()
        assert len(digests) == 1, "every partition makes the same changes"
        for number, (parts, common) in enumerate(kept):
            for part in [*parts, *(common if number == 0 else [])]:
                self.source.apply(part)
        return sorted((row["k"], row["what"], row["n"]) for row in out)


def row(k: str, n: int) -> dict[str, Any]:
    return {"k": k, "op": "x", "n": n}


def test_a_process_reads_a_state_once_for_each_checkpoint_and_a_job_does_not_see_anothers() -> None:
    world, other = World(partitions=4), World(partitions=2)
    world.copies = other.copies = BroadcastCopies()
    every = [row(k, 1) for k in "abcd"]
    for rules, broken in (([("five", 6)], "five"), ([], "five"), ([("two", 2)], "five two"), ([], "five two")):
        before = world.source.calls["fetch_entries"]
        assert world.run(every, rules) == [(k, f"x {broken}", 1) for k in "abcd"]
        assert world.source.calls["fetch_entries"] - before == 1
    other.batch = world.batch - 1
    assert other.run(every) == [(k, "x ", 1) for k in "abcd"]
    assert world.run(every) == [(k, "x five two", 1) for k in "abcd"]


def test_what_is_too_large_is_kept_by_no_process() -> None:
    copies, asked = BroadcastCopies(), []

    def read(found: list[tuple[bytes, bytes]] | None) -> list[tuple[bytes, bytes]] | None:
        return copies.whole("job", "op", 1, 1, lambda: asked.append(found) or found)

    assert [read(None), read(None), read([(b"k", b"v")]), read(None)] == [None, None, *[[(b"k", b"v")]] * 2]
    assert len(asked) == 3


def test_rules_are_there_before_the_rows_of_their_batch_for_every_key_and_stay() -> None:
    world = World(partitions=3)
    assert world.run([row("a", 5), row("b", 5)]) == [("a", "x ", 5), ("b", "x ", 5)]
    assert world.run([row("a", 5), row("b", 1), row("c", 9)], [("five", 6), ("two", 2)]) == [
        ("a", "x five", 5),
        ("b", "x five two", 1),
        ("c", "x ", 9),
    ]
    assert world.run([row("z", 1)]) == [("z", "x five two", 1)]
    # A batch that has rules alone, and one that takes a rule back.
    assert world.run([], [("ten", 10)]) == []
    assert world.run([row("c", 9)], [("five", None), ("two", None), ("none", None)]) == [("c", "x ten", 9)]
    world.partitions = 1
    assert world.run([row("q", 1)]) == [("q", "x ten", 1)]
    assert world.run([row("q", 1)], [("*", None)]) == [("q", "x ", 1)] == world.run([row("q", 1)])


def test_of_rows_of_one_batch_every_partition_sees_the_same_last() -> None:
    world = World(partitions=5)
    for _ in range(20):
        assert world.run([row(k, 7) for k in "abcde"], [("r", n) for n in range(9)]) == [(k, "x r", 7) for k in "abcde"]


def test_a_batch_without_rules_and_without_a_look_at_them_costs_no_call() -> None:
    class Blind(Rules):
        def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Any:
            yield Row(k=key[0], what="", n=len(list(rows)))

    world = World(Blind, partitions=1)
    world.run([row("a", 1)], [("r", 1)])
    world.source.calls.clear()
    world.run([row("a", 1), row("b", 1)])
    assert dict(world.source.calls) == {"fetch_many": 1}


def test_a_large_map_is_read_entry_by_entry_and_a_small_one_in_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    class Lookup(Rules):
        def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Any:
            for each in rows:
                found = self.rules.getValue((str(each.n),))
                yield Row(k=key[0], what=repr(found and found.least), n=each.n)

    small = World(Lookup, partitions=1)
    small.run([], [(str(n), n) for n in range(50)])
    small.source.calls.clear()
    assert small.run([row("a", n) for n in (3, 60)]) == [("a", "3", 3), ("a", "None", 60)]
    assert small.source.calls["fetch_entries"] == 1
    large = World(Lookup, partitions=1)
    monkeypatch.setattr(BroadcastState, "whole_bytes", 100)
    large.run([], [(str(n), n) for n in range(50)])
    large.source.calls.clear()
    assert large.run([row("a", n) for n in (3, 60)]) == [("a", "3", 3), ("a", "None", 60)]
    assert large.source.calls["fetch_entry"] == 2


def rule_method(body: Any) -> type[Rules]:
    class Odd(Rules):
        def handleBroadcastRows(self, name: str, rows: Any) -> Any:
            return body(self, rows)

    return Odd


def input_method(body: Any) -> type[Rules]:
    class Odd(Rules):
        def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Any:
            body(self)
            return iter(())

    return Odd


def init_method(body: Any) -> type[Rules]:
    class Odd(Rules):
        def init(self, handle: Any) -> None:
            super().init(handle)
            body(handle, self)

    return Odd


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (rule_method(lambda self, rows: iter([Row(k="a", what="", n=1)])), "yields rows for 'rules', and every part"),
        (rule_method(lambda self, rows: self.n.get()), "where there is no grouping key"),
        (rule_method(lambda self, rows: 1 // 0), "ZeroDivisionError"),
        (input_method(lambda self: self.rules.updateValue(("x",), ("x", 1))), "in handleBroadcastRows only"),
        (input_method(lambda self: self.rules.removeKey(("x",))), "removing key from broadcast state: .*handleBroad"),
        (input_method(lambda self: self.rules.clear()), "in handleBroadcastRows only"),
        (input_method(lambda self: self.handle.getBroadcastState("other")), r"pass broadcast=\{'other': stream\}"),
        (init_method(lambda handle, self: handle.getBroadcastState("other")), "there is 'rules'"),
        (init_method(lambda handle, self: handle.getValueState("rules", "n long")), "broadcast state and .* value"),
        (init_method(lambda handle, self: handle.getBroadcastState("rules", "a long", "b long")), "the user key str"),
        (init_method(lambda handle, self: handle.getValueState("n", "n long, m long")), "'n' is .* twice, differently"),
        (init_method(lambda handle, self: self.rules.exists()), "where there is no grouping key"),
    ],
)
def test_what_cannot_be_done_with_broadcast_state_is_said(make: type[Rules], said: str) -> None:
    with pytest.raises(UserCodeError) as caught:
        World(make, partitions=1).run([row("a", 1)], [("r", 1)])
    # Its other lines quote those above, with what they expect.
    assert re.search(said, str(caught.value).partition("\n")[0])


def test_a_refused_write_is_an_error_of_pyspark_too_and_the_name_alone_finds_the_state_later() -> None:
    seen: list[Any] = []

    def look(self: Any) -> None:
        assert self.handle.getBroadcastState("rules") is self.rules
        try:
            self.rules.updateValue(("x",), ("x", 1))
        except PySparkRuntimeError as error:
            seen.append(error)

    World(input_method(look), partitions=1).run([row("a", 1)])
    assert isinstance(seen[0], Invalid)


def test_a_function_with_yield_that_yields_nothing_runs_and_schemas_may_be_given() -> None:
    class Yielding(Rules):
        def init(self, handle: Any) -> None:
            self.rules = handle.getBroadcastState("rules", "id string", "least long")

        def handleBroadcastRows(self, name: str, rows: Any) -> Any:
            for each in rows:
                self.rules.updateValue((each.id,), (each.least,))
            yield from ()

        def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Any:
            yield Row(k=key[0], what=repr(sorted(self.rules.values())), n=len(list(rows)))

    assert World(Yielding).run([row("a", 1)], [("r", 4), ("s", 3)]) == [("a", "[(3,), (4,)]", 1)]


def test_a_pandas_processor_gets_frames_and_reads_the_same_map() -> None:
    class Frames(Rules):
        def handleBroadcastRows(self, name: str, rows: Any) -> None:
            for frame in rows:
                assert list(frame.columns) == ["id", "least"]
                for each in frame.itertuples(index=False):
                    self.rules.updateValue((each.id,), (each.id, int(each.least)))

        def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Any:
            n = sum(int(frame["n"].sum()) for frame in rows)
            broken = " ".join(sorted(rule for (rule,), (_, least) in self.rules.iterator() if n < least))
            yield pd.DataFrame({"k": [key[0]], "what": [broken], "n": [n]})

    world = World(Frames, style="pandas")
    assert world.run([row("a", 2), row("a", 3), row("b", 9)], [("six", 6), ("ten", 10)]) == [
        ("a", "six ten", 5),
        ("b", "ten", 9),
    ]


def test_rows_come_by_their_columns_whatever_the_types(seed: int) -> None:
    kinds = parse_ddl("f double, n decimal(9,2), t timestamp, m map<string,int>, s struct<a:int>, b binary")
    stream = BroadcastStream("all", "c", kinds)
    values = [
        {"f": f, "n": None, "t": dt.datetime(2024, 1, day), "m": [("k", n)], "s": {"a": n}, "b": b"x"}
        for f in (float("nan"), -0.0, 0.0, None, 2.0, 10.0)
        for day in (2, 1)
        for n in (10, 9)
    ]
    fields = [("f", pa.float64()), ("n", pa.decimal128(9, 2)), ("t", pa.timestamp("us", "UTC"))]
    fields += [("m", pa.map_(pa.string(), pa.int32())), ("s", pa.struct([("a", pa.int32())])), ("b", pa.binary())]
    rng, orders = random.Random(seed), []
    for _ in range(6):
        rng.shuffle(values)
        carried = pa.array([[one] for one in values], pa.list_(pa.struct(fields)))
        (found,) = rows_of_streams([pa.RecordBatch.from_arrays([carried], ["c"])], [stream])
        orders.append([repr(each) for each in found.rows.to_pylist()])
    assert all(order == orders[0] for order in orders)
    (found,) = rows_of_streams([pa.RecordBatch.from_arrays([carried], ["c"])], [stream])
    assert [each.f for each in found.take("row", None)][::4][2:4] == [2.0, 10.0]  # type: ignore[arg-type]
