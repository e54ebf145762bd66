"""Known bugs, built in again: the simulation must see each one within a bounded number of seeds, or a test must fail.

How many it takes with the faults that a night's seeds draw: ``python -m tests.simulation detect``.
"""

import json
import re
from pathlib import Path

import pytest

from tests.simulation import __main__ as simulate
from tests.simulation import run_seed
from tests.simulation.journal import JournalFile
from tests.simulation.mutants import ROOT, Mutant, edited, known_bugs

MOST_SEEDS = 120
MUTANTS = known_bugs()


@pytest.mark.drawn(2)
@pytest.mark.parametrize(
    "mutant", [each for each in MUTANTS if each.faults is not None], ids=lambda mutant: mutant.name
)
def test_each_known_bug_is_seen_when_it_is_built_in_again(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant.build_in(monkeypatch)
    for seed in range(MOST_SEEDS):
        result = run_seed(seed, plan=mutant.plan())
        if result.violations:
            print(f"seen with seed {seed}: {result.violations[0]}")
            return
    pytest.fail(f"{MOST_SEEDS} seeds have not seen it: {mutant.what}")


@pytest.mark.drawn(8)
@pytest.mark.parametrize("mutant", [each for each in MUTANTS if each.fails_with], ids=lambda mutant: mutant.name)
def test_a_known_bug_is_caught_by_the_test_that_keeps_it_out(
    mutant: Mutant, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test passes without the bug, or the suite would say so: nothing but the bug makes it fail here."""
    mutant.build_in(monkeypatch)
    with pytest.raises(mutant.failure, match=mutant.saying):
        mutant.run_test(seed)


def test_each_known_bug_can_still_be_built_in() -> None:
    lost = {}
    for mutant in MUTANTS:
        try:
            edited(mutant.edits)
        except (ValueError, SyntaxError) as error:
            lost[mutant.name] = error
    assert lost == {}


def test_a_bug_that_cannot_be_built_in_is_not_taken_for_one_that_nobody_sees() -> None:
    for old, new, why in (("no such text", "", "0 times"), ("import deque\n", "import deque  #\n", "does what it did")):
        with pytest.raises(ValueError, match=why):
            edited([["dstl/checkpoint/assembly.py", old, new]])


def test_bugs_are_counted_in_seeds_and_the_count_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    journal = tmp_path / "journal"
    names = ["broadcast_state_is_written_by_the_last_partition", "all_materialize_at_the_same_moment"]
    command = ["detect", "--journal", str(journal), "--json", *(each for name in names for each in ("--bug", name))]
    for most in ("1", "2"):
        assert simulate.main([*command, "--most", most]) == 0
        figures = json.loads(capsys.readouterr().out)
        assert [each["found"] for each in figures["bugs"]] == [True, False]
        assert figures["found_by_their_tests_alone"] == names[1:]
    lines = [(line["bug"], line["seeds"]) for line in JournalFile(journal).lines]
    assert lines == [(names[1], 0), (names[0], 1), (names[1], 1), (names[1], 2)]
    assert figures["bugs"][1]["seeds"] == 2


def test_the_page_has_the_known_bugs() -> None:
    written = (ROOT / "dstl/docs/decisions/time-to-detection.md").read_text()
    assert sorted(re.findall(r"^\| `(\w+)` \|", written, re.MULTILINE)) == sorted(each.name for each in MUTANTS)
