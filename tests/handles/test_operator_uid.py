"""A base's operator becomes a directory: no name that a manifest may hold leads out of its place."""

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from dstl.errors import CorruptData
from dstl.taskmanager.task_manager import table_directory
from handles.checkpoint import CompletedCheckpoint, OperatorEntry
from handles.materialized_handle import MaterializationReport, MaterializedStateHandle
from handles.operator_uid import is_operator_uid

BAD = [
    "",
    ".",
    "..",
    "../../../etc",
    "/etc/cron.d",
    "a/b",
    "a\\b",
    "a\0b",
    "a b",
    "a\n",
    "ä",
    "x" * 65,
    "a.b",
    "%2e%2e",
]


def manifest(**changes: Any) -> dict[str, Any]:
    base = {
        "operator": "op",
        "materialization_id": 1,
        "checkpoint": 1,
        "name": "00/q/w/base",
        "size": 8,
        "checksum": 0,
        "parts": [[0, 0, 8]],
    }
    fields = {
        "checkpoint_id": 1,
        "batch_id": 0,
        "query_id": "q",
        "run_id": "r",
        "max_parallelism": 1,
        "created_at": 0.0,
        "operators": [{"uid": "op", "parallelism": 1, "key_types": "int"}],
        "materialized": [base],
        "logs": [{"log_id": "l", "operator": "op", "first_key_group": 0, "last_key_group": 0, "from_sqn": 1}],
        "truncated": [{"operator": "op", "first_key_group": 0, "last_key_group": 0, "checkpoint": 1}],
    }
    for part, operator in changes.items():
        (entry,) = fields[part]  # type: ignore[misc]
        fields[part] = [{**entry, ("uid" if part == "operators" else "operator"): operator}]
    return fields


def test_an_honest_manifest_is_taken() -> None:
    assert CompletedCheckpoint.model_validate(manifest()).materialized[0].operator == "op"


@pytest.mark.parametrize("name", BAD)
@pytest.mark.parametrize("part", ["operators", "materialized", "logs", "truncated"])
def test_no_manifest_has_an_operator_whose_name_is_a_path(part: str, name: str) -> None:
    with pytest.raises(ValidationError, match="should match pattern"):
        CompletedCheckpoint.model_validate(manifest(**{part: name}))
    for kind, entry in (
        (OperatorEntry, manifest()["operators"][0] | {"uid": name}),
        (MaterializedStateHandle, manifest()["materialized"][0] | {"operator": name}),
        (MaterializationReport, {"operator": name, "checkpoint": 1, "first_key_group": 0, "last_key_group": 0}),
    ):
        with pytest.raises(ValidationError, match="should match pattern"):
            kind.model_validate(entry)


@pytest.mark.parametrize("part", ["materialized", "logs", "truncated"])
def test_every_base_and_log_is_of_an_operator_that_the_checkpoint_lists(part: str) -> None:
    with pytest.raises(ValidationError, match="has state of other, an operator that it does not list"):
        CompletedCheckpoint.model_validate(manifest(**{part: "other"}))


def test_no_operator_is_listed_twice() -> None:
    fields = manifest()
    with pytest.raises(ValidationError, match="lists an operator twice"):
        CompletedCheckpoint.model_validate({**fields, "operators": fields["operators"] * 2})


@pytest.mark.parametrize("name", BAD)
def test_a_table_lies_below_its_directory_whatever_its_operator_is_called(name: str, tmp_path: Path) -> None:
    """A worker may name one too, and no manifest is asked then."""
    assert not is_operator_uid(name)
    with pytest.raises(CorruptData, match="is not an operator's name"):
        table_directory(tmp_path, name, 0)


def test_an_operators_tables_have_a_directory_each(tmp_path: Path) -> None:
    for name in ("op", "operator-1", "A_b-9", "x" * 64):
        assert table_directory(tmp_path, name, 3) == tmp_path / f"{name}-3"
