"""Sums of doubles by group that do not depend on the order of the rows, nor on the other groups.

A sum of doubles is rounded at each step, so its last digits depend on the order, and a shuffle keeps none. Here every
number is cut into slices of 27 bits at places that are the same for all numbers (Rump, Ogita and Oishi 2008). Within
one place a group's slices add up without any rounding; only the few sums of the places are rounded, in order.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

_BITS = 26
"""Bits of the number of rows that a group may have."""
_STEP = 53 - _BITS
"""Powers of two between two places, which is what a slice holds."""
_HIGHEST, _LOWEST = 1022, -1022
"""Powers of two between which the place of a cut is an ordinary double."""
_LARGE = math.ldexp(1.0, _HIGHEST - _BITS)
"""From here on a cut would overflow."""

_Doubles = npt.NDArray[np.float64]
_Codes = npt.NDArray[np.int64]


def exact_sums(numbers: _Doubles, codes: _Codes, count: int) -> _Doubles:
    """Return the sum of each group: at least as close as one after the other, and the same in any order.

    How a group is added depends on its own numbers alone, so it may share a call with any others.

    Args:
        numbers: One per row.
        codes: For each row, the number of its group.
        count: How many groups there are.
    """
    rows = np.bincount(codes, minlength=count)
    if rows.max(initial=0) <= 2:
        with np.errstate(over="ignore", invalid="ignore"):
            return _with_one_nan(plain_sums(numbers, codes, count))
    if _largest(numbers) < _LARGE and rows.max() <= 1 << _BITS:
        return _finite_sums(numbers, codes, rows)
    with np.errstate(over="ignore", invalid="ignore"):
        finite = np.isfinite(numbers)
        large = finite & (np.abs(numbers) >= _LARGE)
        in_order = (rows > 1 << _BITS) | (plain_sums(large.astype(np.float64), codes, count) > 0)
        cut = finite & ~in_order[codes]
        sums = _finite_sums(np.where(cut, numbers, 0.0), codes, rows)
        order = np.lexsort((numbers, codes))
        order = order[(finite & ~cut)[order]]
        sums[in_order] = plain_sums(numbers[order], codes[order], count)[in_order]
        # Beside a number that is not finite the others do not count; such numbers make the same sum in any order.
        rest = plain_sums(np.where(finite, 0.0, numbers), codes, count)
        return _with_one_nan(np.where(rest == 0, sums, rest))


def _finite_sums(numbers: _Doubles, codes: _Codes, rows: npt.NDArray[np.intp]) -> _Doubles:
    """Return the sums of groups of numbers below :data:`_LARGE`."""
    count = len(rows)
    # Two numbers are rounded once, in either order.
    plain = plain_sums(numbers, codes, count)
    sums: list[_Doubles] = []
    rest, slices, left = numbers, np.empty_like(numbers), np.empty_like(numbers)
    while True:
        cut = math.ldexp(1.5, _place(rest))
        np.add(rest, cut, out=slices)
        slices -= cut
        sums.append(plain_sums(slices, codes, count))
        rest = np.subtract(rest, slices, out=left)
        if not rest.any():
            break
    total = sums.pop()
    while sums:
        total = total + sums.pop()
    return np.where(rows <= 2, plain, total)


def _place(numbers: _Doubles) -> int:
    """Return the power of two at which to cut: on a ladder, so that it does not matter which other numbers there are.

    ``2**26`` slices together stay below it, and a cut on a higher rung would leave the numbers whole.
    """
    fraction, exponent = math.frexp(_largest(numbers))
    needed = exponent - (fraction == 0.5) + _BITS
    return max(_HIGHEST - (_HIGHEST - needed) // _STEP * _STEP, _LOWEST)


def _largest(numbers: _Doubles) -> float:
    return float(max(numbers.max(initial=0.0), -numbers.min(initial=0.0)))


def plain_sums(numbers: _Doubles, codes: _Codes, count: int) -> _Doubles:
    """Return the sum of each group, of its rows one after the other."""
    # Of no rows numpy makes integers.
    return np.bincount(codes, weights=numbers, minlength=count).astype(np.float64, copy=False)


def _with_one_nan(numbers: _Doubles) -> _Doubles:
    numbers[np.isnan(numbers)] = np.nan
    return numbers
