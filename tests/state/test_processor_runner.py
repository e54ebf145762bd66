"""The runner against PySpark's own in-memory tester, and what only the runner does."""

import gc
import inspect
import random

import pyarrow as pa
import pytest
from pyspark.sql import Row
from pyspark.sql.streaming import stateful_processor
from pyspark.sql.streaming.stateful_processor import StatefulProcessor
from pyspark.sql.streaming.tws_tester import TwsTester

import dstl.state.list_state
import dstl.state.map_state
import dstl.state.value_state
from dstl.errors import UserCodeError
from dstl.state.entry_state import EntryState
from dstl.state.handle import ProcessorHandle
from dstl.state.processor_runner import ProcessorOperator, ProcessorRunner, discover_states
from dstl.state.registry import StateRegistry
from dstl.state.task_input import TaskInput
from dstl.taskmanager.reads import nothing_held
from worlds.ddl import schemas_of_tests
from worlds.runner import INPUT, KEY, OPS, OUTPUT, Counter, Job, Script, Seen, TimedScript, a_runner, batches_of


def random_rows(rng, now):
    keys = [None, "", "a", "b", "cc", "d"]
    return [
        {"k": rng.choice(keys), "op": rng.choice(OPS), "n": now + rng.randrange(-20, 40)}
        for _ in range(rng.randrange(60))
    ]


def in_key_order(rows):
    return sorted(rows, key=lambda r: (r["k"] is not None, r["k"] or ""))


@pytest.mark.parametrize("options", [{}, {"part_bytes": 1}, {"part_bytes": 300}])
@pytest.mark.parametrize("mode", ["none", "processingTime"])
def test_the_same_as_pysparks_tester(seed, mode, options):
    rng = random.Random(f"{seed}-{mode}-{options}")
    make = Script if mode == "none" else TimedScript
    for _ in range(6):
        tester = TwsTester(make(), timeMode=mode)
        job = Job(make, time_mode=mode, **options)
        for batch in range(1, 6):
            now = 1000 + 20 * batch
            rows = random_rows(rng, now)
            expected = []
            tester._currentProcessingTimeMs = now
            for key in dict.fromkeys(r["k"] for r in in_key_order(rows)):
                given = [Row(**r) for r in rows if r["k"] == key]
                expected += [r.asDict() for r in tester.test(key, given)]
            fired = [r.asDict() for r in tester._handleExpiredTimers()]
            out = job.run(batches_of(rows, rng.choice([1, 2, 3, 7, 1000])), now)
            assert out[: len(expected)] == expected
            order = lambda r: (r["k"] is not None, r["k"] or "", str(r))  # noqa: E731
            assert sorted(out[len(expected) :], key=order) == sorted(fired, key=order)
            times = [r["n"] for r in out[len(expected) :] if r["what"] == "fired"]
            assert times == sorted(times)


def test_states_of_all_keys_of_a_batch_are_fetched_in_one_call():
    job = Job(Script)
    rows = [{"k": f"k{i:03d}", "op": op, "n": i} for i in range(300) for op in ("update", "append", "set", "look")]
    job.run(batches_of(rows, 10_000))
    assert job.source.calls["fetch_many"] == 1
    job.source.calls.clear()
    out = job.run(batches_of([{"k": f"k{i:03d}", "op": "look", "n": i} for i in range(300)], 10_000))
    assert len(out) == 300
    assert job.source.calls["fetch_many"] == 1
    assert job.source.calls["fetch_entries"] < 20
    assert job.source.calls["fetch_entry"] == 0


def test_writing_to_lists_and_maps_reads_nothing():
    job = Job(Script)
    job.run(batches_of([{"k": "a", "op": op, "n": 1} for op in ("append", "extend", "put", "set", "remove")], 10))
    assert dict(job.source.calls) == {"fetch_many": 1}


def test_a_key_whose_entries_are_too_many_is_read_piece_by_piece(monkeypatch):
    job, whole = Job(Script), Job(Script)
    monkeypatch.setattr(EntryState, "whole_bytes", 20)
    rng = random.Random(1)
    ops = ["append", "set", "set", "look", "look", "look", "remove", "extend"]
    for turn in range(8):
        rows = [{"k": k, "op": rng.choice(ops), "n": rng.randrange(50)} for k in "ab" for _ in range(8)]
        if turn == 5:
            rows += [{"k": "b", "op": op, "n": 3} for op in ("clearmap", "look", "put", "look", "set", "look")]
        small = job.run(batches_of(rows, 10))
        with monkeypatch.context() as patch:
            patch.setattr(EntryState, "whole_bytes", 1 << 20)
            assert whole.run(batches_of(rows, 10)) == small
    assert job.source.calls["scan_entries"] > 0
    assert job.source.calls["fetch_entry"] > 0
    assert whole.source.calls["scan_entries"] == 0


class FirstOnly(Counter):
    take = 1


@pytest.mark.parametrize("chunk", [1, 2, 3, 4, 100])
def test_rows_that_are_not_taken_are_skipped_also_across_batches(chunk):
    rows = [{"k": k, "op": "", "n": 0} for k in "aaabbbbbbbc"]
    job = Job(FirstOnly)
    assert [(r["k"], r["n"]) for r in job.run(batches_of(rows, chunk))] == [("a", 1), ("b", 1), ("c", 1)]
    job = Job(Counter)
    assert [(r["k"], r["n"]) for r in job.run(batches_of(rows, chunk))] == [("a", 3), ("b", 7), ("c", 1)]
    assert [(r["k"], r["n"]) for r in job.run(batches_of(rows, chunk))] == [("a", 6), ("b", 14), ("c", 2)]
    changes = pa.Table.from_batches(job.parts)
    assert changes.num_rows == 3, "one change for each key, however often it was updated"


@pytest.mark.parametrize("whole_bytes", [1, 1 << 20])
def test_an_iteration_sees_the_entries_of_when_it_began_whatever_is_written_meanwhile(whole_bytes, monkeypatch):
    class Swaps(Script):
        def step(self, key, op, n):
            if op != "swap":
                yield from super().step(key, op, n)
                return
            self.list.appendValue((n,))
            self.map.updateValue((n,), (n,))
            elements, entries, keys = self.list.get(), self.map.iterator(), self.map.keys()
            self.list.put([(-1,)])
            self.map.removeKey((n,))
            self.map.updateValue((-1,), (-1,))
            yield Row(k=key[0], what=repr(([*elements], sorted(entries), sorted(keys))), n=n)

    monkeypatch.setattr(EntryState, "whole_bytes", whole_bytes)
    job = Job(Swaps)
    job.run(batches_of([{"k": "a", "op": op, "n": n} for n in (2, 3) for op in ("append", "set")], 100))
    (found,) = job.run(batches_of([{"k": "a", "op": "swap", "n": 4}], 100))
    assert found["what"] == repr(([(2,), (3,), (4,)], [((2,), (2,)), ((3,), (3,)), ((4,), (4,))], [(2,), (3,), (4,)]))


def test_rows_of_a_key_are_pulled_lazily():
    pulled = []

    def stream():
        for i, batch in enumerate(batches_of([{"k": "a", "op": "", "n": i} for i in range(6)], 2)):
            pulled.append(i)
            yield batch

    class Lazy(Counter):
        def handleInputRows(self, key, rows, timerValues):
            for row in rows:
                yield Row(k=key[0], what=str(len(pulled)), n=row.n)

    out = Job(Lazy).run(stream())
    assert [int(r["what"]) for r in out] == [1, 1, 2, 2, 3, 3]


def test_reducing_and_aggregating_states_fold():
    class Mean:
        def create_accumulator(self):
            return (0, 0)

        def add(self, value, accumulator):
            return (accumulator[0] + value, accumulator[1] + 1)

        def get_result(self, accumulator):
            return accumulator[0] / accumulator[1]

    class Folds(StatefulProcessor):
        def init(self, handle):
            self.most = handle.getReducingState("most", "n long", lambda a, b: max(a, b))
            self.mean = handle.getAggregatingState("mean", "total long, n long", Mean())

        def handleInputRows(self, key, rows, timerValues):
            assert self.most.get() is None or self.most.exists()
            for row in rows:
                self.most.add((row.n,))
                self.mean.add(row.n)
            yield Row(k=key[0], what=repr(self.mean.get()), n=self.most.get()[0])

    job = Job(Folds)
    assert [(r["n"], r["what"]) for r in job.run(batches_of([{"k": "a", "op": "", "n": n} for n in (1, 5, 3)], 2))] == [
        (5, "3.0")
    ]
    assert [(r["n"], r["what"]) for r in job.run(batches_of([{"k": "a", "op": "", "n": 3}], 2))] == [(5, "3.0")]


def test_the_driver_learns_the_states_and_tasks_keep_to_them():
    class Old(Seen):
        def init(self, handle):
            self.n = handle.getValueState("n", "n long")
            self.x = handle.getListState("gone", "n long")

    class New(Seen):
        def init(self, handle):
            handle.deleteIfExists("gone")
            self.n = handle.getValueState("n", "n long, added string")
            self.x = handle.getMapState("gone", "u long", "n long")

    class WithoutDeleting(Seen):
        def init(self, handle):
            self.x = handle.getMapState("gone", "u long", "n long")

    job = Job(Old)
    job.run(batches_of([{"k": "a", "op": "", "n": 0}], 5))
    old = StateRegistry.from_wire(job.stored)
    operator = ProcessorOperator(name="op", key_schema=KEY, input_schema=INPUT, output_schema=OUTPUT)
    found = discover_states(New(), operator, old, schemas_of_tests(), nothing_held())
    assert {d.name: (d.state_id, len(d.schemas)) for d in found.descriptors} == {"n": (0, 2), "gone": (2, 1)}
    assert found.removed == {1}
    settled = StateRegistry.from_wire(found.to_wire(), settled=True)
    runner = ProcessorRunner(New(), operator, settled, schemas_of_tests())
    assert list(runner.run(iter(()), TaskInput(job.source, lambda part: None, 2))) == []
    assert {d.name: d.state_id for d in settled.declared} == {"n": 0, "gone": 2}
    with pytest.raises(UserCodeError, match="'gone' is stored as a list state and declared as map"):
        a_runner(
            WithoutDeleting(),
            StateRegistry.from_wire(job.stored),
            key_schema=KEY,
            input_schema=INPUT,
            output_schema=OUTPUT,
        ).run(iter(()), TaskInput(job.source, lambda part: None, 2)).__next__()


def test_the_collectors_thresholds_are_put_back():
    before = gc.get_threshold()
    Job(Counter).run(batches_of([{"k": "a", "op": "", "n": 0}], 5))
    assert gc.get_threshold() == before


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (ProcessorHandle, stateful_processor.StatefulProcessorHandle),
        (dstl.state.value_state.ValueState, stateful_processor.ValueState),
        (dstl.state.list_state.ListState, stateful_processor.ListState),
        (dstl.state.map_state.MapState, stateful_processor.MapState),
    ],
)
def test_methods_and_arguments_are_named_as_pysparks(ours, theirs):
    for name, method in inspect.getmembers(theirs, inspect.isfunction):
        if not name.startswith("_"):
            own = inspect.signature(getattr(ours, name)).parameters
            assert {n: p.default for n, p in own.items()} == {
                n: p.default for n, p in inspect.signature(method).parameters.items()
            }
            assert getattr(ours, name).__module__.startswith("dstl."), f"{name} would call the JVM"
