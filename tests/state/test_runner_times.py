"""Timers, times to live, late rows, and the order of a processor's calls."""

import pandas as pd
import pyarrow as pa
import pytest
from pyspark.sql import Row
from pyspark.sql.streaming.stateful_processor import StatefulProcessor
from pyspark.sql.types import StructType

from dstl.errors import Invalid, UserCodeError
from dstl.state.registry import StateRegistry
from dstl.state.task_input import TaskInput
from dstl.state.timers import expiry_ms
from worlds.ddl import parse_ddl
from worlds.runner import INPUT, KEY, OUTPUT, Counter, Job, Seen, TimedScript, a_runner, batches_of, group_of


def test_the_order_of_calls_and_the_timer_values():
    Seen.log = []
    Job(Seen).run(batches_of([{"k": "a", "op": "", "n": 0}], 5), now=77)
    assert Seen.log[0] == "init"
    assert Seen.log[-1] == "close"
    times = Seen.log[1][2]
    assert (times.getCurrentProcessingTimeInMs(), times.getCurrentWatermarkInMs()) == (-1, -1)
    Seen.log = []
    Job(Seen, time_mode="EventTime").run(batches_of([{"k": "a", "op": "", "n": 0}], 5), now=77, watermark=70)
    times = Seen.log[1][2]
    assert (times.getCurrentProcessingTimeInMs(), times.getCurrentWatermarkInMs()) == (77, 70)


def test_a_timer_fires_with_a_row_for_a_key_and_as_settled_when_input_ends():
    class Timer(Seen):
        def handleInputRows(self, key, rows, timerValues):
            for at in (100, 50, -5, 101):
                self.handle.registerTimer(at)
            return iter(())

        def handleExpiredTimer(self, key, timerValues, expiredTimerInfo):
            at = expiredTimerInfo.getExpiryTimeInMs()
            if at == -5:
                self.handle.deleteTimer(50)
                self.handle.registerTimer(60)
            yield Row(k=key.k, what=repr(list(self.handle.listTimers())), n=at)

    job = Job(Timer, time_mode="processingTime")
    out = job.run(batches_of([{"k": "a", "op": "", "n": 0}], 5), now=100)
    # As measured on Spark 4.3: a timer deleted meanwhile fires, one registered meanwhile waits.
    assert [(r["n"], r["what"]) for r in out] == [
        (-5, "[-5, 60, 100, 101]"), (50, "[60, 100, 101]"), (100, "[60, 100, 101]")
    ]  # fmt: skip
    out = job.run([], now=100)
    assert [(r["n"], r["what"]) for r in out] == [(60, "[60, 101]")]
    stored = job.source.content(job.ids()["$timers"])
    assert [expiry_ms(user_key) for _, user_key in stored] == [101]


def test_only_timers_of_the_partitions_key_groups_fire():
    job = Job(TimedScript, time_mode="processingTime")
    job.run(batches_of([{"k": k, "op": "timer", "n": 50} for k in ("a", "b")], 5), now=10)
    own = [group_of("a")]
    registry = StateRegistry.from_wire(job.stored)
    runner = a_runner(
        TimedScript(), registry, key_schema=KEY, input_schema=INPUT, output_schema=OUTPUT, time_mode="processingTime"
    )
    out = [r for b in runner.run(iter(()), TaskInput(job.source, lambda part: None, 9, own, 50)) for r in b.to_pylist()]
    assert {r["k"] for r in out} == {"a"}


@pytest.mark.parametrize("time_mode", ["processingTime", "eventTime"])
def test_stored_timers_of_one_time_do_not_fire_by_another(time_mode):
    job = Job(TimedScript, time_mode=time_mode)
    job.run(batches_of([{"k": "a", "op": "timer", "n": 5000}], 4))
    job.mode = "none"
    assert job.run([], now=6000, watermark=6000) == []
    job.mode = "eventTime" if time_mode == "processingTime" else "processingTime"
    with pytest.raises(Invalid, match=r"stored timers, .* 'timer' was of .* time and is of .* with the timeMode"):
        job.run([], now=6000, watermark=6000)
    job.mode = time_mode.upper()
    assert [row["n"] for row in job.run([], now=6000, watermark=6000) if row["what"] == "fired"] == [5000]


def test_many_timers_come_in_pages(monkeypatch):
    from dstl.state import timers

    monkeypatch.setattr(timers, "_PAGE", 3)
    job = Job(TimedScript, time_mode="processingTime", part_bytes=1)
    # Every one of them registers another five later, which is due as well and yet waits for the next batch.
    rows = [{"k": f"k{i}", "op": "timer", "n": at} for i in range(10) for at in (3, 6)]
    job.run(batches_of(rows, 5), now=0)
    own = [{"k": "k0", "op": "timer", "n": 2}, {"k": "k1", "op": "untimer", "n": 3}]
    out = job.run(batches_of(own, 5), now=40)
    assert [r["n"] for r in out if r["what"] == "fired"] == [2] + 9 * [3] + 10 * [6]
    out = job.run([], now=40)
    assert [r["n"] for r in out if r["what"] == "fired"] == 9 * [8] + 10 * [11]


@pytest.mark.parametrize("how", ["value", "list", "map"])
def test_a_value_past_its_time_to_live_is_gone_and_changes_nothing_whether_it_is_still_there(how):
    class Living(Seen):
        def init(self, handle):
            self.v = handle.getValueState("value", "n long", 100)
            self.l = handle.getListState("list", "n long", 100)
            self.m = handle.getMapState("map", "u long", "n long", 100)

        def handleInputRows(self, key, rows, timerValues):
            for row in rows:
                if row.op == "write":
                    self.v.update((row.n,))
                    self.l.appendValue((row.n,))
                    self.m.updateValue((row.n,), (row.n,))
            seen = {
                "value": self.v.get() or (),
                "list": [n for (n,) in self.l.get()],
                "map": [n for ((n,), _) in self.m.iterator()],
            }
            yield Row(k=key[0], what=how, n=sum(seen[how]))

    job = Job(Living, time_mode="processingTime")
    look = {"k": "a", "op": "look", "n": 0}
    assert job.run(batches_of([{**look, "op": "write", "n": 5}], 5), now=1000)[0]["n"] == 5
    assert job.run(batches_of([look], 5), now=1099)[0]["n"] == 5
    if how != "value":
        assert job.run(batches_of([{**look, "op": "write", "n": 7}], 5), now=1050)[0]["n"] == 12
        assert job.run(batches_of([look], 5), now=1100)[0]["n"] == 7
    assert job.source.content(job.ids()[how])
    assert job.run(batches_of([look], 5), now=1200)[0]["n"] == 0
    assert sum(part.num_rows for part in job.parts) == 0, "another attempt may find that it was swept away"


def initial_batches(initial, rows, chunk):
    kind = pa.schema([
        ("k", pa.string()), ("op", pa.string()), ("n", pa.int64()),
        ("__dstl_initial_state", pa.struct([("k", pa.string()), ("start", pa.int64())])),
    ])  # fmt: skip
    both = [{"k": k, "__dstl_initial_state": {"k": k, "start": n}} for k, n in initial] + rows
    return batches_of(both, chunk, kind)


@pytest.mark.parametrize("chunk", [1, 2, 3, 100])
@pytest.mark.parametrize("style", ["row", "pandas"])
def test_initial_state_comes_before_the_rows_of_its_key(chunk, style):
    class Start(StatefulProcessor):
        def init(self, handle):
            self.n = handle.getValueState("n", "n long")

        def handleInitialState(self, key, initialState, timerValues):
            total = sum(initialState.start.tolist()) if style == "pandas" else initialState.start
            self.n.update((int(total) + sum(self.n.get() or (0,)),))

        def handleInputRows(self, key, rows, timerValues):
            taken = list(rows)
            # The rows of initial state have nulls in n, which are no reason to make floats of the others.
            assert style == "row" or all(frame["n"].dtype == "int64" for frame in taken)
            n = sum(self.n.get() or (0,)) + sum(len(r) if style == "pandas" else 1 for r in taken)
            self.n.update((n,))
            yield pd.DataFrame({"k": [key[0]], "what": [""], "n": [n]}) if style == "pandas" else Row(k=key[0], n=n)

    rows = [{"k": k, "op": "", "n": 0} for k in "aabbb"]
    job = Job(Start, style=style)
    out = job.run(initial_batches([("a", 100), ("a", 1000), ("c", 5)], rows, chunk))
    assert [(r["k"], r["n"]) for r in out] == [("a", 1102), ("b", 3)]
    out = job.run(batches_of([{"k": "c", "op": "", "n": 0}], 5))
    assert [(r["k"], r["n"]) for r in out] == [("c", 6)]


def test_late_rows_are_dropped_and_the_latest_time_is_known():
    kind = pa.schema([("k", pa.string()), ("op", pa.string()), ("n", pa.int64()), ("t", pa.timestamp("us", "UTC"))])
    schema = StructType([*INPUT.fields, *parse_ddl("t timestamp").fields])
    rows = [
        {"k": k, "op": "", "n": 0, "t": t} for k, t in (("a", 999_000), ("a", 1_000_000), ("b", 1_000_001), ("c", None))
    ]
    job = Job(Counter, time_mode="eventTime", schema=schema, event_time="t")
    out = job.run(batches_of(rows, 10, kind), watermark=1000)
    assert [r["k"] for r in out] == ["b", "c"]
    assert job.runner.max_event_time_ms == 1000
    assert job.runner.late_rows == 2


@pytest.mark.parametrize("part_bytes", [1, 8 << 20])
@pytest.mark.parametrize("chunk", [1, 2, 3, 100])
def test_a_late_row_sees_what_the_rows_on_time_have_written_also_where_that_was_sent(chunk, part_bytes):
    class Latecomers(StatefulProcessor):
        def init(self, handle):
            self.n, self.all = handle.getValueState("n", "n long"), handle.getListState("all", "n long")

        def handleInputRows(self, key, rows, timerValues):
            for row in rows:
                self.n.update(((self.n.get() or (0,))[0] + row.n,))
                self.all.appendValue((row.n,))
            yield Row(k=key[0], what=repr([n for (n,) in self.all.get()]), n=self.n.get()[0])

        def handleLateRows(self, key, rows, timerValues):
            return self.handleInputRows(key, rows, timerValues)

        def handleExpiredTimer(self, key, timerValues, expiredTimerInfo):
            return iter(())

    kind = pa.schema([("k", pa.string()), ("op", pa.string()), ("n", pa.int64()), ("t", pa.timestamp("us", "UTC"))])
    schema = StructType([*INPUT.fields, *parse_ddl("t timestamp").fields])
    on_time = [{"k": k, "op": "", "n": n, "t": 2_000_000} for k in "abcd" for n in (1, 2)]
    late = [{"k": k, "op": "", "n": n, "t": 0} for k in "bcde" for n in (10, 20)]
    job = Job(Latecomers, time_mode="eventTime", schema=schema, event_time="t", part_bytes=part_bytes)
    for batch in range(1, 3):
        out = job.run(batches_of(on_time + late, chunk, kind), watermark=1000)
        last = {row["k"]: (row["n"], row["what"]) for row in out}
        expected = {k: [1, 2] * (k != "e") + [10, 20] * (k != "a") for k in "abcde"}
        assert last == {k: (batch * sum(ns), repr(batch * ns)) for k, ns in expected.items()}


def test_a_timer_is_a_whole_number_of_milliseconds():
    class Registers(Seen):
        def handleInputRows(self, key, rows, timerValues):
            self.handle.registerTimer((key[0] == "a" and 5000.0) or 5000.5)
            self.handle.registerTimer(5000)
            assert list(self.handle.listTimers()) == [5000]
            return iter(())

        def init(self, handle):
            self.handle = handle

    job = Job(Registers, time_mode="processingTime")
    job.run(batches_of([{"k": "a", "op": "", "n": 0}], 5))
    with pytest.raises(UserCodeError, match=r"whole number of milliseconds.* not 5000\.5"):
        job.run(batches_of([{"k": "b", "op": "", "n": 0}], 5))
