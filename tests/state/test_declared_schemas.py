"""Schemas that a processor declares as text are read on the driver, and looked up in tasks."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
from pyspark.sql import Row
from pyspark.sql.streaming.stateful_processor import StatefulProcessor

from dstl.errors import Invalid, UserCodeError
from dstl.state.descriptor import DeclaredSchemas
from dstl.state.processor_runner import ProcessorOperator, ProcessorRunner, discover_states
from dstl.state.registry import StateRegistry
from dstl.state.task_input import TaskInput
from worlds.ddl import parse_ddl, schemas_of_tests
from worlds.memory_source import MemorySource
from worlds.runner import INPUT, KEY, OUTPUT, batches_of


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


@pytest.mark.parametrize(("text", "works"), [("n long", True), ("n  long", False)])
def test_a_task_runs_with_the_texts_of_the_driver(text: str, works: bool) -> None:
    schemas = schemas_of_tests()
    registry = discover_states(Declares(), StateRegistry(KEY), "none", "op", schemas, MemorySource())
    processor = Declares()
    processor.text = text
    runner = ProcessorRunner(
        processor,
        ProcessorOperator(name="op", key_schema=KEY, input_schema=INPUT, output_schema=OUTPUT),
        StateRegistry.from_wire(registry.to_wire(), settled=True),
        shipped(schemas),
    )
    batches = iter(batches_of([{"k": "a", "op": "", "n": 0}], 5))
    run = runner.run(batches, TaskInput(MemorySource(), lambda part: None, 1))
    if works:
        assert [row["n"] for batch in run for row in batch.to_pylist()] == [1]
    else:
        with pytest.raises(UserCodeError, match="schema of state 'm' cannot be used: init"):
            next(run)
