"""What a run may not change about the operators of the checkpoint that it starts from."""

import json
from collections.abc import Mapping
from typing import Any

import pytest

from dstl.checkpoint.state_catalogue import ExpectedOperator, StateCatalogue
from dstl.errors import Invalid
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
