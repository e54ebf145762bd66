"""An operator never takes another one's state for its own because the types happen to agree."""

from __future__ import annotations

import json

import pytest

from dstl.checkpoint.state_catalogue import check_key_columns
from dstl.errors import Invalid
from handles.checkpoint import OperatorEntry


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
