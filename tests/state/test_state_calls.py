"""Calls that a state refuses: as PySpark's own states refuse them, so that a processor that catches goes on."""

import re

import pytest
from pyspark.errors import PySparkRuntimeError
from pyspark.sql import Row
from pyspark.sql.types import ArrayType, IntegerType, StringType, StructField, StructType

from dstl.errors import StateTooLarge, Unavailable, UserCodeError
from dstl.state.processor_errors import StateCallError
from worlds.memory_source import MemorySource
from worlds.runner import Counter, Job, Script, Seen, batches_of

ONE = batches_of([{"k": "a", "op": "", "n": 0}], 5)

CALLS = [
    ("checking value state exists", lambda p: p.v.exists()),
    ("getting value state", lambda p: p.v.get()),
    ("updating value state", lambda p: p.v.update((1,))),
    ("clearing value state", lambda p: p.v.clear()),
    ("checking value state exists", lambda p: p.l.exists()),
    ("updating value state", lambda p: p.l.put([(1,)])),
    ("updating value state", lambda p: p.l.appendValue((1,))),
    ("updating value state", lambda p: p.l.appendList([(1,)])),
    ("clearing value state", lambda p: p.l.clear()),
    ("checking map state exists", lambda p: p.m.exists()),
    ("getting value", lambda p: p.m.getValue((1,))),
    ("checking if map state contains key", lambda p: p.m.containsKey((1,))),
    ("updating map state value", lambda p: p.m.updateValue((1,), (1,))),
    ("removing key from map state", lambda p: p.m.removeKey((1,))),
    ("clearing map state", lambda p: p.m.clear()),
]


class Deletes(Seen):
    """Declares states and deletes them in the same ``init``, but for ``kept``."""

    def init(self, handle):
        self.v = handle.getValueState("v", "n long")
        self.kept = handle.getValueState("kept", "n long")
        self.l = handle.getListState("l", "n long")
        self.m = handle.getMapState("m", "u long", "n long")
        for name in ("v", "l", "m"):
            handle.deleteIfExists(name)

    def handleInputRows(self, key, rows, timerValues):
        n = len(list(rows)) + (self.kept.get() or (0,))[0]
        self.kept.update((n,))
        for doing, call in CALLS:
            with pytest.raises(PySparkRuntimeError, match=f"^Error {doing}: state '.' is deleted by the init"):
                call(self)
        found = [list(each) for each in (self.l.get(), self.m.iterator(), self.m.keys(), self.m.values())]
        assert found == [[]] * 4
        yield Row(k=key[0], what="", n=n)


def test_a_state_that_init_declares_and_deletes_refuses_every_use_and_the_others_go_on():
    job = Job(Deletes)
    assert [job.run(ONE)[0]["n"] for _ in range(3)] == [1, 2, 3]
    assert job.ids() == {"kept": 1}


def test_a_state_without_a_key_is_refused_as_pysparks_is():
    class Early(Seen):
        def init(self, handle):
            Deletes.init(self, handle)
            self.v, self.l = handle.getValueState("v", "n long"), handle.getListState("l", "n long")
            self.m = handle.getMapState("m", "u long", "n long")
            for doing, call in CALLS:
                with pytest.raises(StateCallError, match=f"^Error {doing}: state '.' is used where there is no group"):
                    call(self)

    assert Job(Early).run(ONE) is not None


NOT_NULL = [
    (StructType([StructField("n", IntegerType(), False)]), (None,)),
    (StructType([StructField("n", IntegerType(), False), StructField("s", StringType())]), (None, None)),
    (StructType([StructField("s", StringType(), False)]), (None,)),
    (StructType([StructField("s", StructType([StructField("x", IntegerType(), False)]))]), (Row(x=None),)),
    (StructType([StructField("s", StructType([StructField("x", StringType(), False)]))]), ({"x": None},)),
    (StructType([StructField("a", ArrayType(IntegerType(), False))]), ([1, None],)),
]


@pytest.mark.parametrize("kind", ["value", "list", "map", "user key"])
@pytest.mark.parametrize(("schema", "value"), NOT_NULL, ids=lambda one: repr(one)[:30])
def test_a_null_where_the_schema_has_none_is_refused_by_every_state(kind, schema, value):
    class Nulls(Seen):
        def init(self, handle):
            if kind == "value":
                self.write = handle.getValueState("x", schema).update
            elif kind == "list":
                self.write = handle.getListState("x", schema).appendValue
            elif kind == "map":
                state = handle.getMapState("x", "u int", schema)
                self.write = lambda value: state.updateValue((1,), value)
            else:
                state = handle.getMapState("x", schema, "n int")
                self.write = lambda value: state.updateValue(value, (1,))

        def handleInputRows(self, key, rows, timerValues):
            doing = "updating map state value" if kind in ("map", "user key") else "updating value state"
            with pytest.raises(PySparkRuntimeError, match=f"^Error {doing}: .*'x'.*(null|None)"):
                self.write(value)
            yield Row(k=key[0], what="went on", n=0)

    job = Job(Nulls)
    assert job.run(ONE)[0]["what"] == "went on"
    assert job.parts == [], "nothing of a refused value is kept"


@pytest.mark.parametrize("given", ["0", "ab", "", "äö"])
def test_a_user_key_of_one_column_may_be_a_bare_string(given):
    class Bare(Seen):
        def init(self, handle):
            self.m = handle.getMapState("m", "u string", "s string")

        def handleInputRows(self, key, rows, timerValues):
            self.m.updateValue(given, given)
            assert self.m.getValue((given,)) == Row(s=given) == self.m.getValue(given)
            assert self.m.containsKey(given)
            assert list(self.m.keys()) == [(given,)]
            self.m.removeKey(given)
            yield Row(k=key[0], what=repr(list(self.m.iterator())), n=0)

    assert Job(Bare).run(ONE)[0]["what"] == "[]"


@pytest.mark.parametrize("where", ["handleInputRows", "handleExpiredTimer"])
def test_an_error_in_user_code_carries_its_traceback_key_and_operator(where):
    class Breaks(Seen):
        def handleInputRows(self, key, rows, timerValues):
            self.handle.registerTimer(1)
            yield Row(k="x", what="", n=1)
            if where == "handleInputRows":
                self.explode()

        def handleExpiredTimer(self, key, timerValues, expiredTimerInfo):
            self.explode()
            yield

        def explode(self):
            raise RuntimeError("the user's own words")

    job = Job(Breaks, time_mode="processingTime")
    with pytest.raises(UserCodeError) as caught:
        job.run(batches_of([{"k": "a", "op": "", "n": 0}], 5), now=5)
    message = str(caught.value)
    for part in (
        "Breaks",
        "operator 'op'",
        "for key ('a',)" if where == "handleInputRows" else "for key Row(k='a')",
        "RuntimeError",
        "the user's own words",
        "in explode",
        f"in {where}",
        "test_state_calls.py",
    ):
        assert part in message
    assert 'processor_runner.py", line' not in message.replace('test_state_calls.py", line', "")
    assert job.parts == [], "nothing is sent after an error"
    assert isinstance(caught.value.__cause__, RuntimeError)


@pytest.mark.parametrize(
    ("use", "message"),
    [
        (lambda self: self.n.update(("x",)), "column 'n' of state 'n'"),
        (lambda self: self.n.update((1, 2)), "takes 1"),
        (lambda self: self.handle.registerTimer(5), "time mode"),
        (lambda self: self.handle.listTimers(), "time mode"),
        (lambda self: self.handle.getValueState("late", "n int"), "'late' is declared after init"),
        (lambda self: self.handle.deleteIfExists("n"), "after init"),
        (lambda self: self.handle.getValueState("n", "n long"), "after init"),
        (lambda self: self.never_declared.get(), "never_declared"),
        (lambda self: None, "NoneType"),
    ],
)
def test_wrong_use_is_told_with_key_and_operator(use, message):
    class Wrong(Seen):
        def handleInputRows(self, key, rows, timerValues):
            return use(self)

    with pytest.raises(UserCodeError, match="operator 'op'") as caught:
        Job(Wrong).run(batches_of([{"k": "a", "op": "", "n": 0}], 5))
    # Its other lines quote those above, with what they expect.
    assert message in str(caught.value).partition("\n")[0]


@pytest.mark.parametrize(
    ("declare", "message"),
    [
        (lambda h: h.getValueState("x", "n int", 1000), "time mode processingTime"),
        (lambda h: h.getValueState("$x", "n int"), "begin with"),
        (lambda h: h.getValueState("x", "n frob"), "schema of state .x. cannot be used"),
        (lambda h: h.getValueState("x", "n int").get(), "no grouping key"),
        (lambda h: h.getListState("x", "n int").appendValue((1,)), "no grouping key"),
        (lambda h: h.getMapState("x", "u int", "n int").getValue((1,)), "no grouping key"),
        (lambda h: (h.getValueState("x", "n int"), h.getListState("x", "n int")), "declared as list"),
    ],
)
def test_wrong_use_in_init(declare, message):
    class Wrong(Seen):
        def init(self, handle):
            declare(handle)

    with pytest.raises(UserCodeError) as caught:
        Job(Wrong).run([])
    assert re.search(message, str(caught.value).partition("\n")[0])


def test_a_time_to_live_must_be_positive():
    class Wrong(Seen):
        def init(self, handle):
            handle.getValueState("x", "n int", -5)

    with pytest.raises(UserCodeError, match="above 0"):
        Job(Wrong, time_mode="processingTime").run([])


def test_an_oversized_value_is_refused(monkeypatch):
    monkeypatch.setattr("dstl.state.handle.MAX_VALUE_BYTES", 500)

    class Large(Seen):
        def init(self, handle):
            self.n = handle.getValueState("big", "s string")

        def handleInputRows(self, key, rows, timerValues):
            self.n.update(("x" * 1000,))
            return iter(())

    with pytest.raises(UserCodeError, match=r"'big' has 10.. bytes, above the limit of 500"):
        Job(Large).run(batches_of([{"k": "a", "op": "", "n": 0}], 5))


@pytest.mark.parametrize("error", [Unavailable("nobody answers"), StateTooLarge("it would outgrow the memory")])
def test_trouble_of_a_task_manager_is_not_blamed_on_the_user(error):
    class Gone(MemorySource):
        def fetch_entries(self, *given):
            raise error

    with pytest.raises(type(error), match=str(error)):
        Job(Script).run(batches_of([{"k": "a", "op": "look", "n": 0}], 5), source=Gone())


def test_an_error_of_the_input_passes_as_it_is_even_inside_user_code():
    def stream():
        yield batches_of([{"k": "a", "op": "", "n": 0}], 5)[0]
        raise OSError("the task was killed")

    with pytest.raises(OSError, match="the task was killed"):
        Job(Counter).run(stream())
