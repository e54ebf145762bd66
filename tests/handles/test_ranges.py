"""Key groups and sequence numbers: ranges cover everything once, whatever the numbers."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from handles.key_group import MAX_MAX_PARALLELISM, KeyGroupRange, partition_of, range_of_partition
from handles.segment_handle import SequenceNumberRange

shares = st.integers(1, MAX_MAX_PARALLELISM).flatmap(
    lambda most: st.tuples(st.just(most), st.integers(1, min(most, 400)))
)


@settings(deadline=None, max_examples=50)
@given(shares)
def test_partitions_cover_every_key_group_exactly_once(share: tuple[int, int]) -> None:
    most, parallelism = share
    ranges = [range_of_partition(p, most, parallelism) for p in range(parallelism)]
    assert (ranges[0].start, ranges[-1].end) == (0, most - 1)
    assert all(before.end + 1 == after.start for before, after in pairwise(ranges))
    assert max(map(len, ranges)) - min(map(len, ranges)) <= 1
    for partition, groups in enumerate(ranges):
        for group in {groups.start, groups.end}:
            assert partition_of(group, most, parallelism) == partition


@pytest.mark.parametrize(
    ("partition", "most", "parallelism", "what"),
    [(0, 4, 5, "parallelism"), (0, 4, 0, "parallelism"), (-1, 4, 2, "partition"), (2, 4, 2, "partition")],
)
def test_a_partition_that_cannot_be_is_refused(partition: int, most: int, parallelism: int, what: str) -> None:
    with pytest.raises(ValueError, match=f"^{what} .* is not in"):
        range_of_partition(partition, most, parallelism)


ends = st.integers(0, 40)


@settings(deadline=None, max_examples=100)
@given(ends, ends, ends, ends)
def test_ranges_behave_as_sets(a: int, b: int, c: int, d: int) -> None:
    one, other = KeyGroupRange(min(a, b), max(a, b)), KeyGroupRange(min(c, d), max(c, d))
    common = one.intersect(other)
    assert set(common or ()) == set(one) & set(other)
    assert len(one) == len(list(one))
    assert all((n in one) == (n in set(one)) for n in range(-1, 42))
    half, rest = SequenceNumberRange(min(a, b), max(a, b)), SequenceNumberRange(min(c, d), max(c, d))
    shared = half.intersect(rest)
    wanted = set(range(half.from_sqn, half.to_sqn)) & set(range(rest.from_sqn, rest.to_sqn))
    assert set(range(shared.from_sqn, shared.to_sqn) if shared else ()) == wanted
    assert len(half) == half.to_sqn - half.from_sqn


def test_all_key_groups_of_a_job_and_how_a_range_is_shown() -> None:
    assert KeyGroupRange.all(8) == KeyGroupRange(0, 7)
    assert KeyGroupRange.all(1) == KeyGroupRange(0, 0)
    assert str(KeyGroupRange(3, 7)) == "3-7"


def test_ranges_that_cannot_be_are_refused() -> None:
    for start, end in ((3, 2), (-1, 2)):
        with pytest.raises(ValueError, match="not a"):
            KeyGroupRange(start, end)
        with pytest.raises(ValueError, match="not a"):
            SequenceNumberRange(start, end)
