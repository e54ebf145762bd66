"""Schemas that a processor declares as text are read on the driver, and looked up in tasks."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
from pyspark.sql import Row
from pyspark.sql.streaming.stateful_processor import StatefulProcessor

from dstl.errors import Invalid
from dstl.state.descriptor import DeclaredSchemas
from worlds.ddl import parse_ddl


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
