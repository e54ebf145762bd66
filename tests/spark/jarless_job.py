"""A driver program whose session nobody has prepared: ``jarless_job.py MASTER SPARKS_OWN RUNS HOME``, run in many ways.

It runs one query, and prints what came out of it; with RUNS of 4 it runs it again behind more input, then another
backend's in another session, and the first again in a new SparkContext of the same JVM.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pyspark.sql import Row, SparkSession
from pyspark.sql.streaming import StatefulProcessor

from dstl.errors import Invalid
from dstl.spark import StateBackend

PAGES = (("a", "b", "a"), ("a", "c"), ("b",))


class Visits(StatefulProcessor):
    def init(self, handle: Any) -> None:
        self.n = handle.getValueState("n", "n long")

    def handleInitialState(self, key: Any, initialState: Row, timerValues: Any) -> None:
        self.n.update((initialState.value,))

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        n = (self.n.get() or (0,))[0] + sum(1 for _ in rows)
        self.n.update((n,))
        yield Row(page=key[0], n=n)


def session(master: str) -> SparkSession:
    builder = SparkSession.builder.master(master) if master else SparkSession.builder
    for name in ("host", "bindAddress"):
        builder = builder.config(f"spark.driver.{name}", "127.0.0.1")
    builder = builder.appName("jarless").config("spark.ui.enabled", "false")
    made = builder.config("spark.sql.shuffle.partitions", "2").getOrCreate()
    made.sparkContext.setLogLevel("OFF")
    return made


def visits(spark: SparkSession, home: Path, state: str, sparks_own: bool) -> list[tuple[str, int]]:
    """Process what is there as a restart does, with a backend of its own; return what it put out."""
    got: list[tuple[str, int]] = []
    with StateBackend(home / state, parallelism=2, spark=spark) as backend:
        rows = spark.readStream.schema("page string, at long").json(str(home / "in"))
        rows = rows.dropDuplicates(["page", "at"]) if sparks_own else rows
        grouped = backend.groupBy(rows, "page")
        # Both come from a source in the jar.
        brought = {"tick": "1 hour", "initialState": spark.createDataFrame([("a", 10)], "page string, value long")}
        out = grouped.transformWithState(
            Visits(), "page string, n long", "update", "processingTime", name="visits", **brought
        )
        query = (
            out.writeStream.outputMode("update")
            .foreachBatch(lambda df, _: got.extend(map(tuple, df.collect())))
            .option("checkpointLocation", backend.checkpoint_location)
            .trigger(availableNow=True)
            .start()
        )
        query.awaitTermination()
    return sorted(got)


def main(master: str, sparks_own: bool, runs: int, home: Path) -> None:
    (home / "in").mkdir(parents=True)

    def add(number: int) -> None:
        rows = [{"page": page, "at": 10 * number + at} for at, page in enumerate(PAGES[number])]
        (home / f"{number}").write_text("\n".join(map(json.dumps, rows)))
        (home / f"{number}").rename(home / "in" / f"{number}.json")

    def tell(**what: Any) -> None:
        print("RESULT " + json.dumps(what), flush=True)

    spark = session(master)
    strategy = spark._jvm.py4j.reflection.ReflectionUtil.getClassLoadingStrategy().toString()  # type: ignore[union-attr]
    add(0)
    tell(first=visits(spark, home, "state", sparks_own))
    if "cluster" in spark.sparkContext.master:
        try:
            visits(spark, home, "refused", True)
        except Invalid as error:
            tell(refused="only the driver can write" in str(error))
    if runs == 1:
        return
    add(1)
    tell(restarted=visits(spark, home, "state", sparks_own))
    tell(second_backend=visits(spark.newSession(), home, "other", sparks_own))
    spark.stop()
    spark = session(master)
    add(2)
    tell(new_context=visits(spark, home, "state", sparks_own))
    assert spark._jvm is not None
    assert spark._jvm.py4j.reflection.ReflectionUtil.getClassLoadingStrategy().toString() == strategy
    assert not spark.sparkContext.getConf().get("spark.jars", "")
    spark.stop()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2] == "True", int(sys.argv[3]), Path(sys.argv[4]))
