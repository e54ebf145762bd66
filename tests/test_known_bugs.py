"""The table of known bugs names tests that exist, so that a renamed or deleted test is noticed."""

import re
from pathlib import Path

from museum import flink, ours

from tests.simulation.mutants import edited_mutants

TESTS = Path(__file__).parent


def test_every_test_that_the_table_names_exists():
    table = (TESTS / "KNOWN_BUGS.md").read_text(encoding="utf-8")
    sources = "\n".join(path.read_text(encoding="utf-8") for path in TESTS.rglob("test_*.py"))
    named = set(re.findall(r"`(test_\w+)`", table))
    mutants = {each.name: each.kept_by for each in edited_mutants()}
    assert not set(re.findall(r"mutant `(\w+)`", table)) - mutants.keys()
    named |= {test for test in mutants.values() if test}
    built_in = {bug.build_in.__name__: bug.seen_by.partition("::")[2] for bug in (*flink.BUGS, *ours.BUGS)}
    assert not {each for pair in built_in.items() for each in pair if f"`{each}`" not in table}
    defined = set(re.findall(r"^ *(?:async )?def (\w+)\(", sources, re.MULTILINE))
    assert len(named) > 40
    assert not named - defined
