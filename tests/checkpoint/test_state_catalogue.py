"""What a run may not change about the operators of its checkpoint, and that none takes the state of another one."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest

from dstl.checkpoint.state_catalogue import ExpectedOperator, StateCatalogue, check_key_columns
from dstl.errors import Invalid
from handles.checkpoint import OperatorEntry
from worlds.manifest_samples import checkpoint
from worlds.service import resolve_states


def test_an_operator_that_groups_by_other_types_than_its_checkpoint_is_refused_with_both_named() -> None:
    catalogue = StateCatalogue()
    catalogue.expect(ExpectedOperator("op", 4, "string,bigint", resolve_states))
    with pytest.raises(Invalid, match=r"operator 'op' groups by \(string,bigint\), but its checkpoint by \(string\)"):
        catalogue.open(checkpoint(1, 0))
    catalogue.expect(ExpectedOperator("op", 2, "string", resolve_states))
    catalogue.open(checkpoint(1, 0))


def test_states_are_settled_when_a_run_opens_and_checkpoints_keep_what_its_tasks_are_told() -> None:
    asked: list[object] = []

    def resolve(known: Mapping[str, Any] | None) -> Mapping[str, Any]:
        asked.append(known)
        return {"number": len(asked)}

    catalogue = StateCatalogue()
    catalogue.expect(ExpectedOperator("op", 2, "string", resolve))
    parent = None
    for _ in range(3):
        catalogue.open(parent)
        (entry,), _ = catalogue.entries({}, parent)
        assert json.loads(catalogue.registry_of("op")) == entry.registry
        parent = checkpoint(1, 0).model_copy(update={"operators": (entry,)})
    assert asked == [None, {"number": 1}, {"number": 2}]


def stored(**columns: list[str]) -> dict[str, OperatorEntry]:
    return {
        uid: OperatorEntry(
            uid=uid,
            parallelism=1,
            key_types="string",
            registry={"key": json.dumps({"type": "struct", "fields": [{"name": name} for name in names]})},
        )
        for uid, names in columns.items()
    }


def test_the_names_of_before_pass_in_upper_and_lower_case() -> None:
    check_key_columns({"one": ("page", "user")}, stored(one=["Page", "user"]))
    check_key_columns({"one": ("page",), "new": ("x",)}, stored(one=["page"]))


def test_two_operators_that_have_changed_places_are_told_whose_state_is_where() -> None:
    with pytest.raises(Invalid, match="'operator-1' groups by \\(user\\), but its checkpoint by \\(page\\)") as raised:
        check_key_columns(
            {"operator-1": ("user",), "operator-2": ("page",)},
            stored(**{"operator-1": ["page"], "operator-2": ["user"]}),
        )
    assert "operator 'operator-2' of the checkpoint groups by (user)" in str(raised.value)
    assert "name=" in str(raised.value)


def test_a_renamed_column_and_the_same_columns_in_another_order_are_told_the_cure() -> None:
    with pytest.raises(Invalid, match=r"df\.withColumnRenamed\('site', 'page'\)$"):
        check_key_columns({"one": ("site", "user")}, stored(one=["page", "user"]))
    with pytest.raises(Invalid, match=r"groups by \(b, a\), but its checkpoint by \(a, b\)"):
        check_key_columns({"one": ("b", "a")}, stored(one=["a", "b"]))


@pytest.mark.parametrize("key", [None, "", "{", "[]", '{"fields": [{}]}', 7])
def test_a_checkpoint_that_does_not_say_its_columns_is_left_to_who_reads_them(key: object) -> None:
    entry = OperatorEntry(uid="one", parallelism=1, key_types="string", registry={"key": key})
    check_key_columns({"one": ("a",)}, {"one": entry})
    check_key_columns({"one": ("a",)}, {"one": entry.model_copy(update={"registry": {}})})
