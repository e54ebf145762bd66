"""States as DataFrames, and what a user gets to see when something is wrong with a processor."""

from collections.abc import Iterator
from typing import Any

import pytest
from home import Home
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, Row
from pyspark.sql.streaming import StatefulProcessor

from dstl.errors import Invalid, MissingState, UserCodeError
from dstl.spark import StateBackend, cause

OUTPUT = "k string, mean double"


class Mean:
    """An aggregate function as PyFlink has them."""

    def create_accumulator(self) -> tuple[int, int]:
        return (0, 0)

    def add(self, value: int, accumulator: tuple[int, int]) -> tuple[int, int]:
        return (accumulator[0] + value, accumulator[1] + 1)

    def get_result(self, accumulator: tuple[int, int]) -> float:
        return accumulator[0] / accumulator[1]


class Shelves(StatefulProcessor):
    """One state of each kind; a row of key "bad" sets a timer that is due at once, which raises."""

    def init(self, handle: Any) -> None:
        self.handle = handle
        self.latest = handle.getValueState("latest", "v long, at date")
        self.all = handle.getListState("all", "v long")
        self.by_sign = handle.getMapState("by_sign", "sign string", "v long")
        self.total = handle.getReducingState("total", "v long", lambda a, b: (a[0] + b[0],))
        self.mean = handle.getAggregatingState("mean", "total long, n int", Mean())

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        for row in rows:
            self.latest.update((row.v, None))
            self.all.appendValue((row.v,))
            self.by_sign.updateValue(("plus" if row.v > 0 else None,), (row.v,))
            self.handle.registerTimer(9_000_000_000_000 + row.v)
            self.total.add((row.v,))
            self.mean.add(row.v)
        if key[0] == "bad":
            self.handle.registerTimer(1)
        yield Row(k=key[0], mean=self.mean.get())

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Row]:
        self.raises()
        yield Row(k=key[0])

    def raises(self) -> None:
        raise RuntimeError("the user's own words")


def test_states_are_read_as_typed_rows_of_any_checkpoint(home: Home) -> None:
    source = home.stream()
    source.add([{"k": "a", "v": 1}, {"k": None, "v": -2}])
    source.add([{"k": "a", "v": 3}])
    with home.backend(parallelism=2) as backend:
        with pytest.raises(MissingState):
            backend.read_state(home.spark, "latest")
        first = backend.groupBy(source.read(), "k").transformWithState(
            Shelves(), OUTPUT, "append", "processingTime", name="one"
        )
        checkpoints: list[int] = []
        backend.add_listener(lambda report: checkpoints.append(getattr(report, "checkpoint_id", None) or 0))
        assert source.collect(first, backend) == [(0, "a", 1.0), (0, None, -2.0), (1, "a", 2.0)]

        def rows(name: str, **more: Any) -> list[Any]:
            return sorted(map(tuple, backend.read_state(home.spark, name, **more).collect()), key=repr)

        assert rows("latest") == [(("a",), (3, None)), ((None,), (-2, None))]
        assert rows("latest", checkpoint=min(c for c in checkpoints if c)) == [
            (("a",), (1, None)),
            ((None,), (-2, None)),
        ]
        assert rows("all", operator="one") == [(("a",), (1,)), (("a",), (3,)), ((None,), (-2,))]
        assert rows("total") == [(("a",), (4,)), ((None,), (-2,))]
        assert rows("mean") == [(("a",), (4, 2)), ((None,), (-2, 1))]
        assert rows("by_sign") == [(("a",), ("plus",), (3,)), ((None,), (None,), (-2,))]
        assert rows("$timers") == [
            (("a",), 9_000_000_000_001),
            (("a",), 9_000_000_000_003),
            ((None,), 8_999_999_999_998),
        ]
        schema = backend.read_state(home.spark, "by_sign").schema.simpleString()
        assert schema == "struct<key:struct<k:string>,user_key:struct<sign:string>,value:struct<v:bigint>>"
        with pytest.raises(Invalid, match=r"no state 'nope': 'one' has"):
            backend.read_state(home.spark, "nope")
        with pytest.raises(Invalid, match="no operator 'two'"):
            backend.read_state(home.spark, "latest", operator="two")
        with pytest.raises(MissingState):
            backend.read_state(home.spark, "latest", checkpoint=999_999)


def test_an_error_of_a_timer_is_typed_and_leaves_the_state_as_it_was(home: Home) -> None:
    source = home.stream()

    def shelves(backend: StateBackend) -> DataFrame:
        grouped = backend.groupBy(source.read(), "k")
        return grouped.transformWithState(Shelves(), OUTPUT, "append", "processingTime", name="shelves")

    source.add([{"k": "a", "v": 1}])
    with home.backend(parallelism=2) as backend:
        source.collect(shelves(backend), backend)
    source.add([{"k": "a", "v": 2}, {"k": "bad", "v": 3}])
    why = r"the user's own words[\s\S]*in handleExpiredTimer[\s\S]*in raises"
    with home.backend(parallelism=2) as backend, pytest.raises(StreamingQueryException, match=why) as raised:
        source.collect(shelves(backend), backend)
    assert isinstance(error := cause(raised.value), UserCodeError)
    assert "'shelves'" in str(error)
    assert "('bad',)" in str(error) or "k='bad'" in str(error)
    assert home.stored("shelves", "latest") == {"a": (1, None)}
