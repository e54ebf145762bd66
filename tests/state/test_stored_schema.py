"""A schema out of a checkpoint is data: nothing that it names is imported or called, whatever it says."""

import base64
import json
import pickle
import sys
from pathlib import Path

import pyarrow as pa
import pytest
from pyspark.sql.streaming.stateful_processor import StatefulProcessor
from pyspark.sql.types import (
    ArrayType,
    DecimalType,
    DoubleType,
    IntegerType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
    UserDefinedType,
)

from dstl.errors import CorruptData, Invalid
from dstl.state.codec.stored_schema import MAX_DEPTH, schema_from_json, schema_to_json
from dstl.state.descriptor import StateDescriptor, StateKind
from dstl.state.registry import StateRegistry
from worlds.ddl import parse_ddl
from worlds.runner import Job, batches_of

MODULE = "dstl_hostile_module"


class _Payload:
    """What runs when it is unpickled."""

    def __init__(self, marker: str) -> None:
        self.marker = marker

    def __reduce__(self):
        return (Path.touch, (Path(self.marker),))


@pytest.fixture
def trap(tmp_path, monkeypatch):
    """A module that leaves a mark when it is imported, and a pickle that does when it is loaded."""
    mark = tmp_path / "ran"
    (tmp_path / f"{MODULE}.py").write_text(f"open({str(mark)!r}, 'w').close()\nclass Payload: pass\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield base64.b64encode(pickle.dumps(_Payload(str(mark)))).decode()
    assert MODULE not in sys.modules
    assert not mark.exists()


def udt(pickled, py_class=f"{MODULE}.Payload"):
    return {"type": "udt", "pyClass": py_class, "serializedClass": pickled, "sqlType": "string", "class": "x.Y"}


def struct(*types):
    fields = [{"name": f"f{i}", "type": t, "nullable": True, "metadata": {}} for i, t in enumerate(types)]
    return {"type": "struct", "fields": fields}


def array(of):
    return {"type": "array", "elementType": of, "containsNull": True}


def mapping(key, value):
    return {"type": "map", "keyType": key, "valueType": value, "valueContainsNull": True}


WRAPPED = {
    "a column": lambda t: struct("long", t),
    "the whole schema": lambda t: t,
    "an array": lambda t: struct(array(array(t))),
    "a map's keys": lambda t: struct(mapping(t, "long")),
    "a map's values": lambda t: struct(mapping("long", mapping("string", t))),
    "a struct": lambda t: struct("string", struct(array(struct(t)))),
}


@pytest.mark.parametrize("where", WRAPPED)
@pytest.mark.parametrize("py_class", [f"{MODULE}.Payload", "os.system", f"{MODULE}.sub.Payload", "no_such_module.X"])
@pytest.mark.parametrize("place", ["key", "schema", "older schema", "user key"])
def test_a_forged_user_defined_type_is_refused_and_neither_imported_nor_unpickled(trap, where, py_class, place):
    forged = json.dumps(WRAPPED[where](udt(trap, py_class)))
    honest = parse_ddl("n long").json()
    stored = StateRegistry(parse_ddl("k string"))
    stored.declare("total", StateKind.MAP, parse_ddl("n long"), parse_ddl("u string"))
    data = stored.to_wire()
    state = data["states"][0]
    if place == "key":
        data["key"] = forged
    elif place == "user key":
        state["user_key"] = forged
    else:
        state["schemas"] = [forged] if place == "schema" else [forged, honest]
    named = "an operator's key" if place == "key" else "of state 'total'"
    for read in (
        lambda: StateRegistry.from_wire(data),
        lambda: StateRegistry.from_wire(data, settled=True),
    ):
        with pytest.raises(CorruptData, match=named):
            read()
    if place != "key":
        with pytest.raises(CorruptData, match=named):
            StateDescriptor.from_wire(state)
        # Not even one that was made without from_wire.
        made = StateDescriptor("total", StateKind.MAP, 0, tuple(state["schemas"]), state["user_key"])
        with pytest.raises(CorruptData, match=named):
            _ = (made.value_schemas, made.user_key)


@pytest.mark.parametrize("depth", [MAX_DEPTH, 1_000, 10_000, 100_000])
@pytest.mark.parametrize("kind", ["array", "struct", "map", "metadata"])
def test_a_schema_nested_too_deep_is_refused_without_a_recursion_error(depth, kind):
    opening, closing = {
        "array": ('{"type":"array","containsNull":true,"elementType":', "}"),
        "struct": ('{"type":"struct","fields":[{"name":"f","type":', "}]}"),
        "map": ('{"type":"map","keyType":"string","valueContainsNull":true,"valueType":', "}"),
        "metadata": ('{"m":', "}"),
    }[kind]
    inner = '"long"' if kind != "metadata" else "1"
    factor = 8 if kind == "metadata" else 1
    deep = opening * depth * factor + inner + closing * depth * factor
    field = f'"long","metadata":{deep}' if kind == "metadata" else deep
    text = '{"type":"struct","fields":[{"name":"f","type":' + field + "}]}"
    with pytest.raises(CorruptData, match="the schema of it is not one that DSTL has stored: its types are nested"):
        schema_from_json(text, "the schema of it")


def test_every_type_that_state_can_hold_comes_back_as_it_was():
    text = (
        "a boolean, b tinyint, c smallint, d int not null, e bigint, f float, g double, h decimal(38,18), i string, "
        "j binary, k date, l timestamp, m timestamp_ntz, n void, o char(5), p varchar(7), q interval day to second, "
        "r interval hour, s interval year to month, t interval month, u array<map<string, struct<x: int, y: variant>>>,"
        " v struct<w: array<double>>, w time(3)"
    )
    schema = parse_ddl(text)
    schema["v"].metadata = {"comment": "it"}
    schema = schema.add(StructField("z", StringType("UNICODE")))
    schema = schema.add(StructField("y", DecimalType(5, -2))).add(
        StructField("x", ArrayType(MapType(IntegerType(), LongType(), False), False), False)
    )
    assert schema_from_json(schema_to_json(schema), "it") == schema


def test_a_schema_that_could_not_be_read_back_is_refused_where_it_is_defined():
    deep = LongType()
    for _ in range(MAX_DEPTH + 1):
        deep = ArrayType(deep)
    with pytest.raises(Invalid, match=r"state 'deep'.*nested more than"):
        StateRegistry(parse_ddl("k string")).declare("deep", StateKind.VALUE, StructType([StructField("d", deep)]))


class Point:
    def __init__(self, x, y):
        self.x, self.y = x, y


class PointType(UserDefinedType):
    """A user's own type, which no checkpoint may name."""

    @classmethod
    def sqlType(cls):
        return ArrayType(DoubleType(), False)

    @classmethod
    def module(cls):
        return __name__

    def serialize(self, obj):
        return [obj.x, obj.y]

    def deserialize(self, datum):
        return Point(*datum)


def test_a_user_defined_type_is_stored_as_its_sql_type_and_still_read_as_the_users():
    first = StructType([StructField("at", PointType())])
    second = StructType([StructField("label", StringType()), StructField("at", PointType())])
    schemas = [first]

    class Mover(StatefulProcessor):
        def init(self, handle):
            self.places = handle.getValueState("place", schemas[-1])

        def handleInputRows(self, key, rows, timer_values):
            for row in rows:
                before = self.places.get()
                x = 0.0 if before is None else before[-1].x
                new = Point(x + row["n"], 1.0)
                self.places.update((new,) if len(schemas) == 1 else ("moved", new))
                from pyspark.sql import Row

                yield Row(k=key[0], what=row["op"], n=int(x))

        def close(self):
            pass

    job = Job(Mover)
    rows = [{"k": "a", "op": "move", "n": 3}]
    arrow = pa.schema([("k", pa.string()), ("op", pa.string()), ("n", pa.int64())])
    assert [row["n"] for row in job.run(batches_of(rows, 10, arrow))] == [0]
    assert "udt" not in json.dumps(job.stored)
    assert __name__ not in json.dumps(job.stored)
    schemas.append(second)
    # The first is of the older schema, the second of the newer.
    assert [row["n"] for row in job.run(batches_of(rows, 10, arrow))] == [3]
    assert [row["n"] for row in job.run(batches_of(rows, 10, arrow))] == [6]
    assert len(job.stored["states"][0]["schemas"]) == 2
    assert "udt" not in json.dumps(job.stored)
