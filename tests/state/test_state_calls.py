"""Calls that a state refuses: as PySpark's own states refuse them, so that a processor that catches goes on."""

import pytest
from pyspark.errors import PySparkRuntimeError
from pyspark.sql import Row
from pyspark.sql.types import ArrayType, IntegerType, StringType, StructField, StructType

from dstl.state.processor_errors import StateCallError
from worlds.runner import Job, Seen, batches_of

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
