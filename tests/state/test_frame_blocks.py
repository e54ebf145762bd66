"""Slices and joins below pandas' public face give what its public face gives."""

from __future__ import annotations

import random
from typing import Any, ClassVar

import numpy as np
import pandas as pd
import pytest
from pandas.testing import assert_frame_equal

from dstl.state.frames.frame_reader import frame_slicer, join_frames

COUNT = 50


def wide(count: int = COUNT) -> pd.DataFrame:
    return pd.DataFrame(
        {
            "n": np.arange(count),
            "m": np.arange(count) * 2,
            "x": np.linspace(0, 1, count),
            "b": np.arange(count) % 2 == 0,
            "s": [None if i % 7 == 0 else f"s{i}" for i in range(count)],
            "t": pd.date_range("2020-01-01", periods=count, freq="h"),
            "z": pd.date_range("2020-01-01", periods=count, freq="h", tz="Europe/Berlin"),
            "d": pd.to_timedelta(np.arange(count), unit="s"),
            "c": pd.Categorical(["ab"[i % 2] for i in range(count)]),
            "i": pd.array([None if i % 5 == 0 else i for i in range(count)], dtype="Int64"),
            7: np.arange(count, dtype="int8"),
        }
    )


def test_slices_are_those_of_the_public_face(seed: int) -> None:
    frame, rng = wide(), random.Random(seed)
    cut = frame_slicer(frame)
    assert cut.__name__ == "by_blocks", "this pandas is sliced the slow way"
    for start, stop in [(0, COUNT), (0, 0), (COUNT, COUNT), *(sorted(rng.sample(range(COUNT), 2)) for _ in range(20))]:
        assert_frame_equal(cut(start, stop), frame.iloc[start:stop].reset_index(drop=True))


class WithoutBlocks(pd.DataFrame):
    """As a pandas that is made in another way."""

    @property
    def _constructor(self) -> Any:
        return WithoutBlocks

    raises: ClassVar[type[Exception]] = AttributeError

    def copy(self, deep: bool | None = True) -> Any:
        raise self.raises("_mgr")


@pytest.mark.parametrize("raises", [AttributeError, TypeError, NotImplementedError, IndexError, AssertionError])
def test_another_pandas_is_sliced_and_left_unjoined_by_its_public_face(
    raises: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(WithoutBlocks, "raises", raises)
    frame = wide()
    odd = WithoutBlocks(frame)
    assert_frame_equal(pd.DataFrame(frame_slicer(odd)(3, 9)), frame.iloc[3:9].reset_index(drop=True))
    with pytest.raises(raises):
        odd.copy()

    class Unjoinable:
        @property
        def columns(self) -> Any:
            raise raises("_mgr")

    frames = [Unjoinable(), Unjoinable()]
    assert join_frames(frames) == frames


def test_neighbours_of_one_layout_are_joined_in_their_order(seed: int) -> None:
    rng, frame = random.Random(seed), wide()
    pieces, at = [], 0
    while at < COUNT:
        stop = min(COUNT, at + rng.randrange(1, 4))
        piece = frame.iloc[at:stop].reset_index(drop=True)
        if rng.random() < 0.3:
            piece["n"] = piece["n"].astype(float)
        pieces.append(piece)
        at = stop
    kinds = [piece["n"].dtype for piece in pieces]
    runs = 1 + sum(a != b for a, b in zip(kinds[1:], kinds, strict=False))
    joined = join_frames(pieces)
    assert len(joined) == runs
    whole = pd.concat(joined, ignore_index=True)
    assert_frame_equal(whole.astype({"n": "int64"}), frame)
    assert [each["n"].dtype for each in joined] == [k for i, k in enumerate(kinds) if i == 0 or k != kinds[i - 1]]


def test_other_names_other_order_and_two_columns_of_one_name_are_kept_apart() -> None:
    a = pd.DataFrame({"x": [1], "y": [2]})
    renamed, turned = a.rename(columns={"x": "z"}), a[["y", "x"]]
    twice = pd.DataFrame([[1, 2]], columns=["x", "x"])
    joined = join_frames([a, a, renamed, turned, turned, twice, twice, a])
    assert [(len(each), list(each.columns)) for each in joined] == [
        (2, ["x", "y"]),
        (1, ["z", "y"]),
        (2, ["y", "x"]),
        (2, ["x", "x"]),
        (1, ["x", "y"]),
    ]
    assert joined[2].to_numpy().tolist() == [[2, 1], [2, 1]]
    assert joined[3].to_numpy().tolist() == [[1, 2], [1, 2]]
    assert [len(each) for each in join_frames([a])] == [1]
    assert join_frames([]) == []
