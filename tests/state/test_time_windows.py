"""Windows over columns of moments against Spark's formula, one moment at a time."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from dstl.state.vectorised.time_windows import TimeWindows, Windows, merge_sessions


def windows_of(moment: int, windows: TimeWindows) -> set[int]:
    """Spark's own: the last start at or before the moment, and those before it that still reach it."""
    last = moment - (moment - windows.offset) % windows.slide
    starts = (last - i * windows.slide for i in range(-(-windows.size // windows.slide)))
    return {start for start in starts if start <= moment < start + windows.size}


@settings(deadline=None)
@given(st.lists(st.integers(-200, 200), min_size=1), st.integers(1, 40), st.data())
def test_windows_are_those_of_sparks_formula(moments: list[int], size: int, data: st.DataObject) -> None:
    windows = TimeWindows(size, data.draw(st.integers(1, size)), data.draw(st.integers(-50, 50)))
    panes = windows.panes(np.array(moments, np.int64))
    assert all(pane <= moment < pane + windows.pane for pane, moment in zip(panes, moments, strict=True))
    rows, starts = windows.windows_of(panes)
    for at, moment in enumerate(moments):
        found = starts[rows == at].tolist()
        assert len(found) == len(set(found))
        assert set(found) == windows_of(moment, windows)


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(-50, 50), st.integers(1, 12))))
def test_sessions_are_unions_of_what_touches(pieces: list[tuple[int, int, int]]) -> None:
    keys, starts, lengths = (np.array(each, np.int64) for each in (zip(*pieces, strict=True) if pieces else ([],) * 3))
    order, of_piece, sessions = merge_sessions(Windows(keys, starts, starts + lengths))
    assert sorted(order.tolist()) == list(range(len(pieces)))
    expected: list[tuple[int, int, int]] = []
    for key, start, end in sorted((k, s, s + n) for k, s, n in pieces):
        if expected and expected[-1][0] == key and start <= expected[-1][2]:
            expected[-1] = (key, expected[-1][1], max(end, expected[-1][2]))
        else:
            expected.append((key, start, end))
    assert list(zip(sessions.keys, sessions.starts, sessions.ends, strict=True)) == expected
    for at, session in zip(order, of_piece, strict=True):
        assert sessions.keys[session] == keys[at]
        assert sessions.starts[session] <= starts[at] < sessions.ends[session]
