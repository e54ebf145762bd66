"""Sums of doubles: the same in every order and beside any other groups, and close to the exact ones."""

from __future__ import annotations

import math
import random
from fractions import Fraction

import numpy as np

from dstl.state.vectorised.exact_sums import exact_sums

ODD = (0.0, -0.0, 1e300, -1e300, 5e-324, 1e-310)
ODDEST = (*ODD, 1e308, -1e308, math.inf, -math.inf, math.nan)


def number(rng: random.Random) -> float:
    if rng.random() < 0.1:
        return rng.choice(ODDEST if rng.random() < 0.3 else ODD)
    return rng.uniform(-1, 1) * 10.0 ** rng.randrange(-20, 20)


def sums(rows: list[tuple[int, float]], count: int) -> list[bytes]:
    found = exact_sums(np.array([x for _, x in rows], float), np.array([g for g, _ in rows], np.int64), count)
    return [each.tobytes() for each in found]


def test_a_sum_depends_neither_on_the_order_of_its_rows_nor_on_other_groups(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(500):
        groups = [[number(rng) for _ in range(rng.randrange(0, 9))] for _ in range(rng.randrange(1, 6))]
        rows = [(group, x) for group, xs in enumerate(groups) for x in xs]
        found = sums(rows, len(groups))
        rng.shuffle(rows)
        assert sums(rows, len(groups)) == found
        assert [sums([(0, x) for x in xs], 1)[0] for xs in groups] == found


def test_a_sum_is_as_close_as_one_rounding_of_its_largest_number_allows(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(500):
        xs = [rng.uniform(-1, 1) * 10.0 ** rng.randrange(-20, 20) for _ in range(rng.randrange(3, 40))]
        (found,) = exact_sums(np.array(xs), np.zeros(len(xs), np.int64), 1)
        assert abs(found - float(sum(map(Fraction, xs)))) <= 4 * math.ulp(max(map(abs, xs)))
