"""The short form of fuzzing: what has been found once, and new inputs at every run; the long form is ``fuzz.run``.

Whatever the bytes, a decoder returns or raises an error of ``dstl.errors``, within a second and in bounded memory.
"""

import json

import pytest
from fuzz.run import CHUNK, Found, Journal, execute, fuzz, fuzz_in_chunks
from fuzz.targets import TARGETS, Target

EXECUTIONS = 1500


@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
def test_new_inputs_are_decoded_or_refused(target: Target, seed: int) -> None:
    found = fuzz(target, EXECUTIONS // target.cost, seed)
    assert found.bugs == []
    assert found.refused > found.executions / 10
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


def test_a_long_run_goes_on_where_it_was_stopped(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fuzz.run.CHUNK", CHUNK // 100)
    target = TARGETS["name"]
    whole = fuzz_in_chunks(target, 250, seed=7)
    first = Journal(tmp_path / "journal", 7)
    fuzz_in_chunks(target, 100, 7, first)
    with (tmp_path / "journal").open("a") as torn:
        torn.write('{"target": "name", "chu')
    resumed = Journal(tmp_path / "journal", 8)
    assert (resumed.seed, list(resumed.done)) == (7, [("name", 0)])
    found = fuzz_in_chunks(target, 250, resumed.seed, resumed)
    assert (found.executions, found.decoded, found.refused) == (250, whole.decoded, whole.refused)
    assert list(Journal(tmp_path / "journal", 8).done) == [("name", 0), ("name", 1), ("name", 2)]
