"""Sums of doubles by group that do not depend on the order of the rows.

A sum of doubles is rounded at each step, so its last digits depend on the order, and a shuffle keeps none. Here every
number is cut into slices of a few dozen bits at places that are the same for all numbers (Rump, Ogita and Oishi 2008).
Within one place a group's slices add up without any rounding; only the few sums of the places are rounded, in order.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

__all__ = ["exact_sums"]

_BITS = 53
_HIGHEST, _LOWEST = 1022, -1022
"""Powers of two between which the place of a cut is an ordinary double."""

_Doubles = npt.NDArray[np.float64]


def exact_sums(numbers: _Doubles, codes: npt.NDArray[np.int64], count: int) -> _Doubles:
    """Return the sum of each group: at least as close as one after the other, and the same in any order.

    Args:
        numbers: One per row.
        codes: For each row, the number of its group.
        count: How many groups there are.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        rows = int(np.bincount(codes, minlength=count).max(initial=0))
        if rows <= 2:
            plain = _added(numbers, codes, count)
        else:
            bits = math.ceil(math.log2(rows))
            if math.isfinite(numbers.sum()):
                plain = _finite_sums(numbers, codes, count, bits)
            else:
                finite = np.isfinite(numbers)
                plain = _finite_sums(np.where(finite, numbers, 0.0), codes, count, bits)
                # What is not finite makes the same of its group in any order.
                rest = _added(np.where(finite, 0.0, numbers), codes, count)
                plain = np.where(rest == 0, plain, rest)
        plain[np.isnan(plain)] = np.nan
    return plain


def _finite_sums(numbers: _Doubles, codes: npt.NDArray[np.int64], count: int, bits: int) -> _Doubles:
    """Return the sums of groups of up to ``2**bits`` finite numbers."""
    place = _place(numbers, bits)
    if place > _HIGHEST:
        # Near the end of the range a cut would overflow: in the order of the numbers instead.
        order = np.lexsort((numbers, codes))
        return _added(numbers[order], codes[order], count)
    sums: list[_Doubles] = []
    rest, slices, left = numbers, np.empty_like(numbers), np.empty_like(numbers)
    while True:
        cut = math.ldexp(1.5, max(place, _LOWEST))
        np.add(rest, cut, out=slices)
        slices -= cut
        sums.append(_added(slices, codes, count))
        rest = np.subtract(rest, slices, out=left)
        if not rest.any():
            break
        place = min(place - (_BITS - bits - 1), _place(rest, bits))
    total = sums.pop()
    while sums:
        total = total + sums.pop()
    return total


def _place(numbers: _Doubles, bits: int) -> int:
    """Return the power of two that ``2**bits`` of these numbers together stay below by half."""
    return math.frexp(float(max(numbers.max(initial=0.0), -numbers.min(initial=0.0))))[1] + bits + 1


def _added(numbers: _Doubles, codes: npt.NDArray[np.int64], count: int) -> _Doubles:
    # Of no rows numpy makes integers.
    return np.bincount(codes, weights=numbers, minlength=count).astype(np.float64, copy=False)
