"""Broadcast state through Spark: rules and rows in the same and in different batches, over restarts that rescale."""

import random
from collections.abc import Iterator
from typing import Any

import pandas as pd
import pytest
from home import Home
from pyspark.sql import DataFrame, Row
from pyspark.sql.streaming import StatefulProcessor

from dstl.errors import Invalid, NotDeterministic
from dstl.spark import StateBackend, cause

OUTPUT = "k string, n long, limits string"
RULES = "id string, version long, least long, gone boolean"


class Alerts(StatefulProcessor):
    """Counts a key's rows, and says which rules each breaks."""

    def init(self, handle: Any) -> None:
        self.rules = handle.getBroadcastState("rules", "id string", "version long, least long")
        self.n = handle.getValueState("n", "n long")

    def handleBroadcastRows(self, name: str, rows: Iterator[Any]) -> None:
        for row in rows:
            self.apply(row.id, row.version, row.least, row.gone)

    def apply(self, rule: str, version: int, least: int, gone: bool) -> None:
        held = self.rules.getValue((rule,))
        if held is not None and held.version > version:
            return
        if gone:
            self.rules.removeKey((rule,))
        else:
            self.rules.updateValue((rule,), (version, least))

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Row]:
        n = (self.n.get() or (0,))[0]
        for row in sorted(rows, key=lambda row: row.i):
            n += 1
            yield Row(k=key[0], n=n, limits=self.broken(row.i))
        self.n.update((n,))

    def broken(self, i: int) -> str:
        return " ".join(sorted(rule for (rule,), (_, least) in self.rules.iterator() if i < least))


class PandasAlerts(Alerts):
    """The same on data frames."""

    def handleBroadcastRows(self, name: str, rows: Iterator[pd.DataFrame]) -> None:
        for frame in rows:
            for row in frame.itertuples(index=False):
                self.apply(row.id, int(row.version), int(row.least), bool(row.gone))

    def handleInputRows(self, key: Any, rows: Iterator[pd.DataFrame], timerValues: Any) -> Iterator[pd.DataFrame]:
        taken = (Row(i=int(i)) for frame in rows for i in frame["i"])
        yield pd.DataFrame([row.asDict() for row in super().handleInputRows(key, taken, timerValues)])


class Model:
    """What a job that sees all rules and all keys in one place would say."""

    def __init__(self) -> None:
        self.rules: dict[str, tuple[int, int]] = {}
        self.counts: dict[str | None, int] = {}

    def batch(self, rules: list[dict[str, Any]], rows: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
        for rule in sorted(rules, key=lambda rule: (rule["id"], rule["version"])):
            if self.rules.get(rule["id"], (-1, 0))[0] > rule["version"]:
                continue
            if rule["gone"]:
                self.rules.pop(rule["id"], None)
            else:
                self.rules[rule["id"]] = (rule["version"], rule["least"])
        out = []
        for row in sorted(rows, key=lambda row: row["i"]):
            k = row["k"]
            self.counts[k] = self.counts.get(k, 0) + 1
            broken = " ".join(sorted(rule for rule, (_, least) in self.rules.items() if row["i"] < least))
            out.append((k, self.counts[k], broken))
        return out


def habits(rng: random.Random, number: int, first: int) -> Iterator[tuple[list[Any], list[Any]]]:
    """Batches with rules and rows, with one of them, with neither; rules that replace and take back each other."""
    for batch in range(first, first + number):
        kind = rng.choice(["both", "both", "rules", "rows", "rows", "none"])
        rules = [
            {"id": rng.choice("uvwxyz"), "version": 10 * batch + n, "least": rng.randrange(100), "gone": n % 4 == 3}
            for n in range(rng.randrange(1, 8))
        ]
        rows = [{"k": rng.choice([*"abcdefg", None]), "i": rng.randrange(100)} for _ in range(rng.randrange(1, 30))]
        yield rules if kind in ("both", "rules") else [], rows if kind in ("both", "rows") else []


def test_every_key_sees_every_rule_over_restarts_with_other_parallelism(home: Home, seed: int) -> None:
    rng, model = random.Random(seed), Model()
    rows, rules = home.stream("k string, i long"), home.stream(RULES)
    batch, location, saved_at = 0, home.path / "state", None
    # Style, parallelism, TaskManagers: the first partition, and the copy with it, moves each time.
    for style, parallelism, members in (("row", 3, 1), ("pandas", 1, 2), ("row", 5, 2)):
        want: dict[int, list[tuple[Any, ...]]] = {}
        given = [([], []) if style == "pandas" else ([{"id": "u", "version": 0, "least": 50, "gone": False}], [])]
        for some_rules, some_rows in [*given, *habits(rng, 2, batch + 1)]:
            rules.add(some_rules)
            rows.add(some_rows)
            want[batch] = sorted(model.batch(some_rules, some_rows), key=repr)
            batch += 1
        got: dict[int, list[list[tuple[Any, ...]]]] = {}

        def twice(out: DataFrame, number: int, got: Any = got) -> None:
            # Two actions: both run all tasks, and count once.
            got[number] = [sorted((tuple(row) for row in out.collect()), key=repr) for _ in range(2)]

        # The second run begins in another location, from a savepoint of the first: the copy comes along.
        restore_from = saved_at if style == "pandas" else None
        if restore_from:
            rows.carry_over(location, home.path / "moved")
            location = home.path / "moved"
        backend = StateBackend(
            str(location),
            parallelism=parallelism,
            max_parallelism=8,
            task_managers=members,
            spark=home.spark,
            restore_from=restore_from,
        )
        with backend:
            processor, method = (Alerts(), "transformWithState")
            if style == "pandas":
                processor, method = (PandasAlerts(), "transformWithStateInPandas")
            grouped = backend.groupBy(rows.read(), "k")
            df = getattr(grouped, method)(processor, OUTPUT, "update", "none", broadcast={"rules": rules.read()})
            writer = df.writeStream.foreachBatch(twice).outputMode("update").trigger(availableNow=True)
            writer.option("checkpointLocation", backend.checkpoint_location).start().awaitTermination()
            for number, expected in want.items():
                assert got[number] == [expected, expected], f"batch {number} of {style}"
            held = backend.read_state(home.spark, "rules").collect()
            saved_at = backend.savepoint(style).location if location.name == "state" else None
        # One copy, whatever the number of partitions that read and write it.
        assert sorted((row.user_key.id, tuple(row.value)) for row in held) == sorted(model.rules.items())


def test_partitions_that_do_not_agree_stop_the_query_and_what_cannot_be_broadcast_is_refused_where_it_is_defined(
    home: Home,
) -> None:
    class Guessing(Alerts):
        def apply(self, rule: str, version: int, least: int, gone: bool) -> None:
            self.rules.updateValue((rule,), (version, random.SystemRandom().randrange(1 << 40)))

    class Deaf(StatefulProcessor):
        def init(self, handle: Any) -> None:
            pass

        def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Any:
            return iter(())

    class Unknown(Alerts):
        def init(self, handle: Any) -> None:
            handle.getBroadcastState("others")

    rows, rules = home.stream("k string, i long"), home.stream(RULES)
    rows.add([{"k": "a", "i": 1}])
    rules.add([{"id": "u", "version": 0, "least": 50, "gone": False}])
    what: Any = (OUTPUT, "update", "none")
    static = home.spark.read.schema(RULES).json(str(rules.directory / "in"))
    with home.backend(parallelism=2) as backend:
        group = backend.groupBy(rows.read(), "k")
        for processor, broadcast, said in (
            (Alerts(), {"rules": static}, r"'rules' is a batch DataFrame, .*readStream, or join"),
            (Alerts(), [("rules", rules.read())], "give DataFrames by name, each once"),
            (Alerts(), {"rules": "rules"}, "'rules' is str, not a DataFrame"),
            (Alerts(), {"$rules": rules.read()}, "does not begin with"),
            (Deaf(), {"rules": rules.read()}, "Deaf has no handleBroadcastRows"),
            (Unknown(), {"rules": rules.read()}, "there is no broadcast stream 'others'; there is 'rules'"),
            (Alerts(), None, "there is no broadcast stream 'rules'; there is none"),
        ):
            with pytest.raises(Invalid, match=said):
                group.transformWithState(processor, *what, broadcast=broadcast, name="refused")
        df = group.transformWithState(Guessing(), *what, broadcast={"rules": rules.read()})
        with pytest.raises(Exception, match="have changed the broadcast state differently") as raised:
            rows.collect(df, backend, "update")
        assert isinstance(cause(raised.value), NotDeterministic)
        # A batch query has its rules in its only batch.
        table = home.spark.createDataFrame([("a", 1), ("b", 70), ("c", 1)], "k string, i long")
        with pytest.raises(Invalid, match="is a stream, and the input is not"):
            backend.groupBy(table, "k").transformWithState(Alerts(), *what, broadcast={"rules": rules.read()})
        once = backend.groupBy(table, "k").transformWithState(Alerts(), *what, broadcast={"rules": static})
        assert sorted(map(tuple, once.collect())) == [("a", 1, "u"), ("b", 1, ""), ("c", 1, "u")]
