"""Queries of Spark's own on ``dstl://`` in simulated worlds: every fault of the store, deaths of drivers and hosts."""

import os
from collections import Counter

import pytest

from tests.simulation.faults import FaultKind, FaultPlan
from tests.simulation.file_query import run_file_seed

START = int.from_bytes(os.urandom(4), "big")


FORMER = (408, 2003, 2007, 2009, 2010, 2019, 2036, 3185, 5031, 5147, 5188, 261126000012, 1578801536)
"""Seeds that have found something once."""


@pytest.mark.drawn(4)
@pytest.mark.parametrize("seed", FORMER)
def test_a_seed_that_has_found_something_once_holds(seed: int) -> None:
    assert run_file_seed(seed).violations == []


def test_faults_happen_and_a_drawn_seed_breaks_no_invariant() -> None:
    faults: Counter[FaultKind] = Counter()
    batches = handed_over = 0
    print(f"seeds 7 and {START}")
    for seed in (7, START):
        result = run_file_seed(seed)
        assert not result.violations, result.violations
        faults.update(result.faults)
        batches += result.batches
        handed_over += result.handed_over
    assert batches > 12
    assert handed_over > 0
    assert faults[FaultKind.TASK_MANAGER_CRASH] > 0


@pytest.mark.drawn(2)
@pytest.mark.parametrize("commit", ["now", "with-next"])
@pytest.mark.parametrize("durability", ["commit", "task"])
def test_without_faults_every_run_goes_on_where_the_last_one_was(commit: str, durability: str) -> None:
    options = {"spark.dstl.commit": commit, "spark.dstl.durability": durability}
    result = run_file_seed(7, options, FaultPlan())
    assert not result.violations, result.violations
    assert result.batches > 20
