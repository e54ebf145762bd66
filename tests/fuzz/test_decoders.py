"""The short form of fuzzing: what has been found once, and new inputs at every run; the long form is ``fuzz.run``.

Whatever the bytes, a decoder returns or raises an error of ``dstl.errors``, within a second and in bounded memory.
"""

import json

import pytest
from fuzz.run import Found, execute, fuzz
from fuzz.targets import TARGETS, Target

EXECUTIONS = 1500


@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
def test_new_inputs_are_decoded_or_refused(target: Target, seed: int) -> None:
    found = fuzz(target, EXECUTIONS, seed)
    assert found.bugs == []
    assert found.refused > EXECUTIONS / 10
    assert found.decoded > 0 or target.name == "table_index"  # its files are those of a handle, which is not here


@pytest.mark.parametrize(
    "path",
    [path for target in TARGETS.values() for path in target.kept()],
    ids=lambda path: f"{path.parent.name}-{path.name}",
)
def test_an_input_that_has_found_a_bug_finds_none(path: object) -> None:
    found = Found("kept")
    execute(TARGETS[path.parent.name], path.read_bytes(), found)  # type: ignore[attr-defined]
    assert found.bugs == []


def test_a_bug_in_a_decoder_is_found_and_kept(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fuzz.run.CORPUS", tmp_path)
    planted = Target("planted", lambda data: json.loads(data.decode("latin-1")), [b'{"a": [1, 2, {"b": 3}]}'])
    found = fuzz(planted, 500, seed=1, most_bugs=3)
    assert len(found.bugs) == 3
    assert list(tmp_path.rglob("*"))
