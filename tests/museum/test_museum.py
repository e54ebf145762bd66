"""Each historical bug, built in again, is caught by the test that is said to keep it out.

The test passes without the bug, or the suite would say so: nothing but the bug makes it fail here.
"""

import pytest
from museum import flink, ours
from museum.bug import Bug

BUGS = [*flink.BUGS, *ours.BUGS]


@pytest.mark.drawn(12)
@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: f"{bug.number}, {bug.build_in.__name__}")
def test_a_bug_that_is_built_in_again_is_caught(bug: Bug, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    bug.build_in(monkeypatch)
    with pytest.raises(bug.fails_with, match=bug.saying):
        bug.run_test(seed)
