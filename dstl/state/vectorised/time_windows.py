"""Windows of event time: which a moment lies in, and which of them make one session.

Moments are microseconds since 1970, windows are half-open, and their starts are those of Spark's ``window``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Micros = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class TimeWindows:
    """Windows of one length at regular starts. All in microseconds.

    Attributes:
        size: Length of a window.
        slide: From one start to the next, at most ``size``; equal for windows that do not overlap.
        offset: A start.
    """

    size: int
    slide: int
    offset: int = 0

    @property
    def pane(self) -> int:
        """Length of the pieces that every window is made of: what lies in one lies in the same windows."""
        return self.size if self.size == self.slide else math.gcd(self.size, self.slide)

    @property
    def overlap(self) -> bool:
        """True where a moment is in several windows."""
        return self.size != self.slide

    def panes(self, moments: Micros) -> Micros:
        """Return the start of the pane of each moment."""
        return moments - np.mod(moments - self.offset, self.pane)

    def windows_of(self, panes: Micros) -> tuple[npt.NDArray[np.intp], Micros]:
        """Return the windows that panes lie in: for each, the position of the pane, and the window's start."""
        last = panes - np.mod(panes - self.offset, self.slide)
        back = np.arange(-(-self.size // self.slide)) * self.slide
        starts = last[:, None] - back[None, :]
        inside = panes[:, None] + self.pane <= starts + self.size
        rows, columns = np.nonzero(inside)
        return rows, starts[rows, columns]


@dataclass(frozen=True, slots=True)
class Windows:
    """Some windows, each of one key. All arrays are of one length.

    Attributes:
        keys: Numbers of the keys.
        starts: Where they begin.
        ends: Where they end.
    """

    keys: npt.NDArray[np.int64]
    starts: Micros
    ends: Micros


def merge_sessions(pieces: Windows) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.int64], Windows]:
    """Merge windows of one key that overlap or touch.

    Returns:
        The positions of the pieces in the order of key, start and end; for each of those the number of its session; and
        the sessions, in the same order.
    """
    order = np.lexsort((pieces.ends, pieces.starts, pieces.keys))
    keys, starts, ends = pieces.keys[order], pieces.starts[order], pieces.ends[order]
    begins = np.ones(len(order), np.bool_)
    begins[1:] = keys[1:] != keys[:-1]
    # The latest end so far within the key: ranks of ends stay below the next key's, so one pass over all keys does it.
    distinct, ranks = np.unique(ends, return_inverse=True)
    number = np.cumsum(begins) - 1
    reached = distinct[np.maximum.accumulate(number * len(distinct) + ranks) - number * len(distinct)]
    begins[1:] |= starts[1:] > reached[:-1]
    sessions = np.cumsum(begins) - 1
    first = np.flatnonzero(begins)
    last = np.append(first[1:], len(order)) - 1 if len(order) else first
    return order, sessions, Windows(keys[first], starts[first], reached[last])
