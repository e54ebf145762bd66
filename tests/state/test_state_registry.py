from __future__ import annotations

import json
import pickle
from typing import Any

import pytest
from pyspark.sql import Row
from pyspark.sql.streaming.stateful_processor import StatefulProcessor

from dstl.errors import CorruptData, Invalid
from dstl.state.descriptor import DeclaredSchemas, StateKind
from dstl.state.registry import StateRegistry
from worlds.ddl import parse_ddl

KEY = parse_ddl("k string")


def registry(*states):
    made = StateRegistry(KEY)
    for name, ddl in states:
        made.declare(name, StateKind.VALUE, parse_ddl(ddl))
    return made


def reopened(made, **more):
    return StateRegistry.from_wire(json.loads(json.dumps(made.to_wire())), **more)


def test_numbers_follow_the_order_of_declaration_and_survive():
    made = registry(("b", "n int"), ("a", "n int"))
    assert [(d.name, d.state_id) for d in made.declared] == [("b", 0), ("a", 1)]
    again = reopened(made)
    again.declare("c", StateKind.VALUE, parse_ddl("n int"))
    again.declare("a", StateKind.VALUE, parse_ddl("n int"))
    assert {d.name: d.state_id for d in again.descriptors} == {"b": 0, "a": 1, "c": 2}
    assert [d.name for d in again.declared] == ["c", "a"]


def test_a_removed_states_number_never_comes_back():
    made = reopened(registry(("a", "n int"), ("b", "n int")))
    made.remove("b")
    made.remove("never there")
    assert made.removed == {1}
    assert made.declare("b", StateKind.VALUE, parse_ddl("s string")).state_id == 2
    made = reopened(made)
    assert made.removed == {1}
    assert made.declare("d", StateKind.VALUE, parse_ddl("n int")).state_id == 3


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ("a int", "a string", "from int to string"),
        ("a long", "a int", "from bigint to int"),
        ("a int", "a int not null", "may hold nulls"),
        ("a int", "a int, b int not null", "new column 'b' is NOT NULL"),
        ("a struct<x:int>", "a struct<x:int,y:int not null>", "new column 'a.y' is NOT NULL"),
        ("a array<struct<x:int>>", "a array<struct<x:string>>", "'a.element.x' changes from int to string"),
        ("a map<string,long>", "a map<string,int>", "'a.value' changes from bigint to int"),
        ("a map<string,int>", "a map<int,int>", "keys of map 'a'"),
        ("a decimal(10,2)", "a decimal(10,3)", "from decimal(10,2) to decimal(10,3)"),
        ("a date", "a timestamp", "from date to timestamp"),
    ],
)
def test_an_incompatible_schema_names_the_state_and_both_schemas(old, new, why):
    made = reopened(registry(("balance", old)))
    with pytest.raises(Invalid, match="balance") as caught:
        made.declare("balance", StateKind.VALUE, parse_ddl(new))
    message = str(caught.value)
    assert why in message
    assert parse_ddl(old).simpleString() in message
    assert parse_ddl(new).simpleString() in message


@pytest.mark.parametrize(
    ("user_key", "fits"),
    [("u string, w int", True), ("a string, w int", True), ("w string, u int", False), ("u string, w long", False)],
)
def test_a_user_keys_columns_may_be_renamed_and_never_change_places(user_key, fits):
    made = StateRegistry(KEY)
    made.declare("m", StateKind.MAP, parse_ddl("n int"), parse_ddl("u string, w int"))
    made = reopened(made)
    if fits:
        found = made.declare("m", StateKind.MAP, parse_ddl("n int"), parse_ddl(user_key))
        assert reopened(made).descriptors[0].user_key == found.user_key == parse_ddl(user_key)
    else:
        with pytest.raises(Invalid, match="user key"):
            made.declare("m", StateKind.MAP, parse_ddl("n int"), parse_ddl(user_key))


def test_values_of_every_earlier_schema_must_stay_readable():
    made = registry(("s", "a int, b string"))
    for ddl in ("a int", "a long"):
        made = reopened(made)
        made.declare("s", StateKind.VALUE, parse_ddl(ddl))
    for ddl, why in (("a long, b int", "version 1 of 3"), ("a int", "from bigint to int")):
        with pytest.raises(Invalid, match=why):
            reopened(made).declare("s", StateKind.VALUE, parse_ddl(ddl))
    assert len(reopened(made).declare("s", StateKind.VALUE, parse_ddl("b string, a long")).schemas) == 4


def test_a_task_may_only_declare_what_the_driver_saw():
    made = reopened(registry(("a", "n int")), settled=True)
    made.declare("a", StateKind.VALUE, parse_ddl("n int"))
    made.remove("gone")
    made.end_declarations()
    made.declare("b", StateKind.VALUE, parse_ddl("n int"))
    with pytest.raises(Invalid, match="'b' was not declared when the query was defined"):
        made.end_declarations()
    assert [d.name for d in made.descriptors] == ["a"]


def test_an_init_that_declares_and_deletes_uses_up_no_number_with_each_restart():
    def init(made):
        a = made.declare("a", StateKind.VALUE, parse_ddl("n int"))
        made.declare("gone", StateKind.LIST, parse_ddl("n int"))
        b = made.declare("b", StateKind.VALUE, parse_ddl("n int"))
        made.remove("gone")
        made.end_declarations()
        return a.state_id, b.state_id

    made = registry()
    first = init(made)
    wire = made.to_wire()
    for _ in range(3):
        made = reopened(made)
        assert init(made) == first
        assert made.to_wire() == {**wire, "next_id": made.to_wire()["next_id"]}
    assert made.to_wire()["next_id"] == 3
    assert made.removed == set(), "no table ever had it"
    task = reopened(made, settled=True)
    assert init(task) == first
    assert [d.name for d in task.descriptors] == ["a", "b"]


@pytest.mark.parametrize(
    "data", [{}, {"format": 9}, {"format": 1, "key": "x"}, {"format": 1, "key": "{}", "states": 5}]
)
def test_a_registry_that_cannot_be_read_is_corrupt(data):
    with pytest.raises(CorruptData, match=r"not a state registry|is not one that DSTL has stored"):
        StateRegistry.from_wire(data)


def refuse(text: str) -> Any:
    raise Invalid(f"not a schema: {text}")


def shipped(schemas: DeclaredSchemas) -> DeclaredSchemas:
    found = pickle.loads(pickle.dumps(schemas))
    assert isinstance(found, DeclaredSchemas)
    return found


def test_a_task_knows_the_texts_that_the_driver_has_read_and_no_other() -> None:
    schemas = DeclaredSchemas(parse_ddl)
    assert schemas.schema("n long", "the schema of state 'a'") == parse_ddl("n long")
    task = shipped(schemas)
    assert task.schema("n long", "the schema of state 'b'") == parse_ddl("n long")
    assert task.schema(parse_ddl("m int"), "the schema of state 'c'") == parse_ddl("m int")
    with pytest.raises(
        Invalid, match=r"schema of state 'd' cannot be used: init.. had no 'm int' .* give a StructType"
    ):
        task.schema("m int", "the schema of state 'd'")


def test_a_text_that_is_none_is_refused_by_the_name_of_its_state() -> None:
    with pytest.raises(Invalid, match=r"^the schema of state 'a' cannot be used: not a schema: frob$"):
        DeclaredSchemas(refuse).schema("frob", "the schema of state 'a'")
    given: Any
    for given in (5, None, b"n long"):
        with pytest.raises(Invalid, match=r"schema of state 'a' cannot be used: it is .*, not a StructType"):
            DeclaredSchemas(refuse).schema(given, "the schema of state 'a'")


class Declares(StatefulProcessor):  # type: ignore[misc]
    """Declares a map under the text that it is told."""

    text = "n long"

    def init(self, handle: Any) -> None:
        self.map = handle.getMapState("m", "u string", self.text)

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Any:
        self.map.updateValue(("a",), (len(list(rows)),))
        yield Row(k=key[0], what="n", n=self.map.getValue(("a",))[0])

    def close(self) -> None: ...
