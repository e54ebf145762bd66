"""Cutting and joining of pandas frames by their blocks, at a fraction of pandas' own price.

A pandas-style processor gets and yields one small frame per key, and pandas takes 15 to 50 microseconds to cut one off
or to join one on. Below its public face a frame is an array of each type: cutting and joining those costs a tenth.
Where this pandas is made in another way, the public face serves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any

import numpy as np

__all__ = ["frame_slicer", "join_frames"]

_MAX_LENGTHS = 256


def frame_slicer(frame: Any) -> Callable[[int, int], Any]:
    """Return a function that makes the frame of the rows ``[start, stop)``, numbered from 0, sharing their memory."""
    import pandas as pd

    rows: dict[int, Any] = {}

    def by_blocks(start: int, stop: int) -> Any:
        count = stop - start
        index = rows.get(count)
        if index is None:
            index = pd.RangeIndex(count)
            if len(rows) < _MAX_LENGTHS:
                rows[count] = index
        part = cut(slice(start, stop), axis=1)
        # An index of its own: a processor may name it.
        part.axes[1] = index.view()
        return make(part, part.axes)

    try:
        cut, make = frame.copy()._mgr.get_slice, pd.DataFrame._from_mgr
        works = len(by_blocks(0, len(frame))) == len(frame)
    except Exception:  # Another pandas: nobody knows what it raises here.
        works = False
    return by_blocks if works else _public_slicer(frame)


def join_frames(frames: Sequence[Any]) -> list[Any]:
    """Return the same rows in their order in fewer frames: neighbours with the same columns and types become one."""
    if len(frames) < 2:
        return list(frames)
    try:
        return _join_runs(frames)
    except Exception:  # Another pandas: nobody knows what it raises here.
        return list(frames)


def _join_runs(frames: Sequence[Any]) -> list[Any]:
    layouts = [_layout(frame) for frame in frames]
    joined: list[Any] = []
    first = 0
    for layout, run in groupby(layouts):
        stop = first + sum(1 for _ in run)
        joined.append(_join(frames[first:stop], layout) if stop - first > 1 else frames[first])
        first = stop
    return joined


def _public_slicer(frame: Any) -> Callable[[int, int], Any]:
    import pandas as pd

    def public(start: int, stop: int) -> Any:
        part = frame.iloc[start:stop]
        if start == 0 and stop == len(frame):
            part = part.copy(deep=False)
        part.index = pd.RangeIndex(stop - start)
        # Each slice is handed out once: writing to it is no mistake that pandas should warn of.
        part._is_copy = None
        return part

    return public


def _layout(frame: Any) -> tuple[list[Any], list[tuple[Any, list[int]]]]:
    return frame.columns.tolist(), [(block.dtype, block.mgr_locs.as_array.tolist()) for block in frame._mgr.blocks]


def _join(frames: Sequence[Any], layout: tuple[list[Any], list[tuple[Any, list[int]]]]) -> Any:
    import pandas as pd

    columns: dict[int, Any] = {}
    blocks = [frame._mgr.blocks for frame in frames]
    for number, (_, places) in enumerate(layout[1]):
        values = [each[number].values for each in blocks]
        whole: Any
        if isinstance(values[0], np.ndarray):
            whole = np.concatenate(values, axis=1)
        elif values[0].ndim == 2:
            whole = type(values[0])._concat_same_type(values, axis=1)
        else:
            whole = [type(values[0])._concat_same_type(values)]
        columns.update({place: whole[row] for row, place in enumerate(places)})
    joined = pd.DataFrame({place: columns[place] for place in sorted(columns)}, copy=False)
    joined.columns = frames[0].columns
    return joined
