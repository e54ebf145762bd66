"""The table of known bugs names tests that exist, so that a renamed or deleted test is noticed."""

import re
from pathlib import Path

from tests.simulation.mutants import known_bugs

TESTS = Path(__file__).parent


def test_every_test_that_the_table_names_exists():
    table = (TESTS / "KNOWN_BUGS.md").read_text(encoding="utf-8")
    sources = "\n".join(path.read_text(encoding="utf-8") for path in TESTS.rglob("test_*.py"))
    named = set(re.findall(r"`(test_\w+)`", table))
    mutants = {each.name: each.kept_by.partition("::")[2] for each in known_bugs()}
    assert not set(re.findall(r"mutant `(\w+)`", table)) - mutants.keys()
    named |= {test for test in mutants.values() if test}
    shown = {each for bug in known_bugs() if bug.fails_with for each in (bug.name, mutants[bug.name])}
    assert not {each for each in shown if f"`{each}`" not in table}
    defined = set(re.findall(r"^ *(?:async )?def (\w+)\(", sources, re.MULTILINE))
    assert len(named) > 40
    assert not named - defined
