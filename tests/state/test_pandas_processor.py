"""Pandas-style processors against PySpark's own tester, and the frames that come in and go out."""

from __future__ import annotations

import datetime
import decimal
import random
from typing import Any, ClassVar

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from pandas.testing import assert_frame_equal
from pyspark.sql.streaming.stateful_processor import StatefulProcessor
from pyspark.sql.streaming.tws_tester import TwsTester

from dstl.errors import Invalid
from dstl.state.frames.frame_reader import frame_slicer, join_frames
from dstl.state.keyed_batch import FrameLimits
from dstl.state.registry import StateRegistry
from dstl.state.task_input import TaskInput
from worlds.ddl import parse_ddl
from worlds.memory_source import MemorySource
from worlds.runner import a_runner

KEY = parse_ddl("k string")


def run(make, table, schema, output, source=None, chunk=1000, **options):
    registry = StateRegistry(KEY)
    runner = a_runner(
        make(),
        registry,
        key_schema=KEY,
        input_schema=parse_ddl(schema),
        output_schema=parse_ddl(output),
        style="pandas",
        **options,
    )
    table = table.append_column("__dstl_key_group", pa.array([0] * len(table), pa.int32()))
    parts = []
    source = source or MemorySource()
    batches = iter(table.to_batches(max_chunksize=chunk))
    out = pa.Table.from_batches(
        list(runner.run(batches, TaskInput(source, parts.append, 1))), runner._writer.schema
    ).to_pylist()
    for part in parts:
        source.apply(part)
    return out


class Totals(StatefulProcessor):
    def init(self, handle):
        self.totals = handle.getValueState("totals", "n long, total double")

    def handleInputRows(self, key, rows, timerValues):
        n, total = self.totals.get() or (0, 0.0)
        for frame in rows:
            assert list(frame.index) == list(range(len(frame)))
            n += len(frame)
            total += frame["x"].sum()
        self.totals.update((n, total))
        yield pd.DataFrame({"total": [total], "k": [key[0]], "n": [n]})
        yield pd.DataFrame()


@pytest.mark.parametrize("chunk", [1, 3, 1000])
def test_the_same_as_pysparks_tester(seed, chunk):
    rng = random.Random(seed)
    tester, source = TwsTester(Totals()), MemorySource()
    for _ in range(4):
        rows = sorted(
            [{"k": rng.choice("abcd"), "x": float(rng.randrange(100))} for _ in range(rng.randrange(1, 30))],
            key=lambda r: r["k"],
        )
        expected = []
        for key in dict.fromkeys(r["k"] for r in rows):
            frame = pd.DataFrame([r for r in rows if r["k"] == key])
            expected += tester.testInPandas(key, frame)[["k", "n", "total"]].to_dict("records")
        table = pa.Table.from_pylist(rows, pa.schema([("k", pa.string()), ("x", pa.float64())]))
        out = run(Totals, table, "k string, x double", "k string, n long, total double", source, chunk)
        assert out == expected


def collect(table, schema):
    seen = []

    class Look(StatefulProcessor):
        def init(self, handle):
            pass

        def handleInputRows(self, key, rows, timerValues):
            seen.extend(rows)
            return iter(())

    run(Look, table, schema, "k string")
    return seen


def test_frames_have_the_types_that_sparks_worker_ends_up_with():
    table = pa.table({
        "k": ["a", "a", "b"],
        "i": pa.array([1, 2, 3], pa.int32()),
        "hole": pa.array([1, None, 3], pa.int64()),
        "f": pa.array([1.5, None, 2.5], pa.float32()),
        "ok": pa.array([True, None, False]),
        "t": pa.array([0, None, 3600 * 10**6], pa.timestamp("us", "America/New_York")),
        "d": pa.array([0, None, 1], pa.date32()),
        "s": pa.array([{"x": 1}, None, {"x": 2}]),
        "l": pa.array([[1, 2], None, []]),
    })  # fmt: skip
    first, second = collect(
        table,
        "k string, i int, hole long, f float, ok boolean, t timestamp, d date, s struct<x:long>, l array<long>",
    )
    # The oracle: Spark's worker makes the frame anew from the rows of each key, as this does.
    assert [str(t) for t in first.dtypes] == [
        "object", "int64", "float64", "float64", "object", "datetime64[ns]", "object", "object", "object"
    ]  # fmt: skip
    assert str(second.dtypes["ok"]) == "bool"
    assert first["t"][0] == pd.Timestamp("1969-12-31 19:00:00")
    assert pd.isna(first["t"][1])
    assert second["d"][0] == datetime.date(1970, 1, 2)
    assert first["s"][0] == {"x": 1}
    assert list(first["l"][0]) == [1, 2]
    assert list(second.index) == [0]


def test_a_frame_may_be_written_to():
    class Writes(Totals):
        def handleInputRows(self, key, rows, timerValues):
            for frame in rows:
                frame["twice"] = frame["x"] * 2
                frame.loc[0, "x"] = 1000.0
                yield pd.DataFrame({"k": key[0], "n": len(frame), "total": frame["twice"].sum()}, index=[0])

    table = pa.table({"k": ["a", "a", "b"], "x": [1.0, 2.0, 3.0]})
    out = run(Writes, table, "k string, x double", "k string, n long, total double")
    assert [(r["n"], r["total"]) for r in out] == [(2, 6.0), (1, 6.0)]


def test_a_timestamp_key_is_a_timestamp_of_the_session():
    seen = []

    class Look(Totals):
        def handleInputRows(self, key, rows, timerValues):
            seen.append(key)
            return iter(())

    table = pa.table({"k": pa.array([0, None], pa.timestamp("us", "America/New_York")), "x": [1.0, 2.0]})
    table = table.append_column("__dstl_key_group", pa.array([0, 0], pa.int32()))
    key = parse_ddl("k timestamp")
    runner = a_runner(
        Look(),
        StateRegistry(key),
        key_schema=key,
        input_schema=parse_ddl("k timestamp, x double"),
        output_schema=parse_ddl("k string"),
        style="pandas",
    )
    list(runner.run(iter(table.to_batches()), TaskInput(MemorySource(), lambda part: None, 1)))
    assert seen[0] == (pd.Timestamp("1969-12-31 19:00:00"),)
    assert pd.isna(seen[1][0])


def yielding(*frames):
    class Yields(StatefulProcessor):
        def init(self, handle):
            pass

        def handleInputRows(self, key, rows, timerValues):
            return iter(frames)

    return Yields


ONE = pa.table({"k": ["a"]})


def test_a_frame_with_a_hole_does_not_make_floats_of_the_others_integers():
    big = 2**60 + 1
    make = yielding(
        pd.DataFrame({"n": [big]}), pd.DataFrame({"n": [None, 5.0]}), pd.DataFrame({"n": np.array([7], "int8")})
    )
    assert [r["n"] for r in run(make, ONE, "k string", "n long")] == [big, None, 5, 7]


def test_a_time_that_no_frame_can_hold_is_named_with_its_column():
    rows = pa.table({"k": ["a"], "t": pa.array([datetime.datetime(1, 1, 1)], pa.timestamp("us"))})
    with pytest.raises(Invalid, match="column 't' does not fit a frame of pandas, whose times are of 1677 to 2262"):
        run(yielding(pd.DataFrame({"n": [1]})), rows, "k string, t timestamp_ntz", "n int")


def test_outputs_by_position_where_no_column_has_a_name():
    make = yielding(pd.DataFrame([["x", 1], ["y", 2]]))
    assert run(make, ONE, "k string", "a string, n int") == [{"a": "x", "n": 1}, {"a": "y", "n": 2}]


def test_outputs_of_every_type():
    frame = pd.DataFrame({
        "t": [pd.Timestamp("2020-07-01 12:00:00"), pd.NaT],
        "u": [pd.Timestamp("2020-07-01 12:00:00"), pd.NaT],
        "d": [datetime.date(2020, 1, 1), None],
        "x": [decimal.Decimal("1.5"), None],
        "s": [{"a": 1}, None],
        "m": [{"q": 1}, None],
        "b": [b"x", None],
        "o": [True, None],
    })  # fmt: skip
    out = run(
        yielding(frame), ONE, "k string",
        "t timestamp, u timestamp_ntz, d date, x decimal(5,2), s struct<a:int>, m map<string,int>, b binary, o boolean",
        timezone="America/New_York",
    )  # fmt: skip
    assert out[0]["t"] == datetime.datetime(2020, 7, 1, 16, tzinfo=datetime.UTC)
    assert out[0]["u"] == datetime.datetime(2020, 7, 1, 12)
    assert out[0]["x"] == decimal.Decimal("1.50")
    assert (out[0]["d"], out[0]["s"], out[0]["b"], out[0]["o"]) == (datetime.date(2020, 1, 1), {"a": 1}, b"x", True)
    assert out[0]["m"] == [("q", 1)]
    assert set(out[1].values()) == {None}


@pytest.mark.parametrize(
    ("frame", "message"),
    [
        (pd.DataFrame({"a": ["x"]}), "without the column 'n'"),
        (pd.DataFrame({"n": ["x"]}), "column 'n' is not int"),
        (pd.DataFrame({"n": [2**40]}), "column 'n' is not int"),
        ({"n": [1]}, "yielded dict"),
        (pd.DataFrame({"n": [None]}), "null in column 'n'"),
    ],
)
def test_a_wrong_frame_names_operator_and_column(frame, message):
    with pytest.raises(Invalid, match="operator 'op'") as caught:
        run(yielding(frame), ONE, "k string", "n int not null")
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("limits", "want"),
    [
        (FrameLimits(), {"a": [5], "b": [1]}),
        (FrameLimits(rows=1), {"a": [1] * 5, "b": [1]}),
        (FrameLimits(rows=2), {"a": [2, 2, 1], "b": [1]}),
        (FrameLimits(nbytes=1), {"a": [1] * 5, "b": [1]}),
        (FrameLimits(nbytes=1000), {"a": [5], "b": [1]}),
        (FrameLimits(rows=3, nbytes=1000), {"a": [3, 2], "b": [1]}),
    ],
)
def test_frames_are_as_large_as_sparks_settings_say(limits, want):
    class Lengths(StatefulProcessor):
        def init(self, handle):
            pass

        def handleInputRows(self, key, rows, timerValues):
            frames = list(rows)
            assert all(list(frame.index) == list(range(len(frame))) for frame in frames)
            seen = [x for frame in frames for x in frame["x"]]
            yield pd.DataFrame({"k": [key[0]], "lengths": [[len(frame) for frame in frames]], "seen": [seen]})

    table = pa.table({"k": ["a"] * 5 + ["b"], "x": [1, 2, 3, 4, 5, 6]})
    out = run(Lengths, table, "k string, x long", "k string, lengths array<int>, seen array<long>", frames=limits)
    assert {row["k"]: row["lengths"] for row in out} == want
    assert [row["seen"] for row in out] == [[1, 2, 3, 4, 5], [6]]


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
