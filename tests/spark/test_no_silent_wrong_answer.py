"""What once gave a wrong result without a word is refused by name, or said before it can happen."""

import logging
import sys
from pathlib import Path
from typing import Any

import pytest
from home import Home
from py4j.protocol import Py4JJavaError  # type: ignore[import-untyped]
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from dstl.checkpoint.report import RestoreReport
from dstl.errors import Closed, Invalid, UserCodeError
from dstl.spark import StateBackend, cause
from dstl.spark.application import environment
from worlds.waiting import wait_until

SCHEMA = "page string, user string, at timestamp"


def rows_of(batch: int) -> list[dict[str, Any]]:
    return [{"page": f"p{i % 3}", "user": f"u{i % 5}", "at": f"2026-01-01T{batch:02d}:{i:02d}:00Z"} for i in range(30)]


def warnings_of(caplog: pytest.LogCaptureFixture, part: str) -> list[str]:
    said = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    return [text for text in said if part in text]


@pytest.mark.drawn(1)
@pytest.mark.parametrize("columns", [("user", "page"), ("user",)])
def test_operators_that_change_places_or_columns_do_not_take_each_others_state(
    home: Home, columns: tuple[str, ...]
) -> None:
    source = home.stream(SCHEMA)
    source.add(rows_of(0))
    before = ("page", "user")[: len(columns)]

    def run(*by: str) -> None:
        with home.backend(parallelism=2) as backend:
            counted = [
                backend.groupBy(source.read(), name).agg(F.count("*").alias("n")).withColumnRenamed(name, "key")
                for name in by
            ]
            source.drain(counted[0].union(counted[1]) if len(counted) > 1 else counted[0], backend)

    run(*before)
    source.add(rows_of(1))
    with pytest.raises(StreamingQueryException) as raised:
        run(*columns)
    error = cause(raised.value)
    assert isinstance(error, Invalid)
    assert "operator 'operator-1' groups by (user), but its checkpoint by (page)" in str(error)
    assert ".withColumnRenamed('user', 'page')" in str(error)
    # Nothing was lost: as before, it goes on.
    run(*before)
    assert home.stored("operator-1", "aggregates") == {f"p{i}": (20,) for i in range(3)}


def test_operators_without_names_are_warned_about_once(home: Home, caplog: pytest.LogCaptureFixture) -> None:
    df = home.stream(SCHEMA).read()
    with home.backend("one", parallelism=2) as backend:
        backend.groupBy(df, "page").agg(F.count("*").alias("n"))
        assert not warnings_of(caplog, "without name=")
        backend.groupBy(df, "user").agg(F.count("*").alias("n"), name="users")
        backend.groupBy(df, "at").agg(F.count("*").alias("n"))
    assert len(warnings_of(caplog, "without name=")) == 1
    caplog.clear()
    with home.backend("two", parallelism=2) as backend:
        backend.groupBy(df, "page").agg(F.count("*").alias("n"), name="pages")
        backend.groupBy(df, "user").agg(F.count("*").alias("n"), name="users")
    assert not warnings_of(caplog, "without name=")


def test_a_query_of_a_backend_that_was_closed_is_told_of_it(home: Home) -> None:
    """Often the query starts within ``with StateBackend(...)``, and is awaited behind it."""
    source = home.stream(SCHEMA)
    source.add(rows_of(0))
    with home.backend(parallelism=1) as backend:
        df = backend.groupBy(source.read(), "page").agg(F.count("*").alias("n"), name="pages")
        writer = source.writer(df.select("n"), backend)
    with pytest.raises(Py4JJavaError) as raised:
        writer.start()
    error = cause(raised.value)
    assert isinstance(error, Closed)
    assert "close() it behind the end of its query; define a query anew with a new one" in str(error)


def saved_job(spark: SparkSession, source: Any, location: Path) -> str:
    source.add(rows_of(0))
    source.add(rows_of(1))
    with StateBackend(str(location), parallelism=2, spark=spark) as backend:
        source.drain(backend.groupBy(source.read(), "page").agg(F.count("*").alias("n"), name="pages"), backend)
        return backend.savepoint("mine").location


@pytest.mark.parametrize("keep", [True, False])
def test_a_savepoint_says_before_the_first_batch_whether_the_source_goes_on(
    home: Home, caplog: pytest.LogCaptureFixture, keep: bool
) -> None:
    source = home.stream(SCHEMA)
    savepoint = saved_job(home.spark, source, home.path / "old")
    source.add(rows_of(2))
    restores: list[RestoreReport] = []
    said_at: list[tuple[int, int]] = []
    if keep:
        source.carry_over(home.path / "old", home.path / "new")
    with home.backend("new", parallelism=2, restore_from=savepoint) as backend:
        backend.add_listener(lambda report: restores.append(report) if isinstance(report, RestoreReport) else None)
        df = backend.groupBy(source.read(), "page").agg(F.count("*").alias("n"), name="pages")
        if keep:
            source.drain(df, backend)
        else:

            def each(out: DataFrame, batch: int) -> None:
                out.collect()
                said_at.append((batch, len(warnings_of(caplog, "sources are read from their start"))))

            writer = df.writeStream.foreachBatch(each).option("checkpointLocation", backend.checkpoint_location)
            writer.trigger(availableNow=True).start().awaitTermination()
    said = warnings_of(caplog, "sources are read from their start")
    (restored,) = restores
    assert restored.savepoint_batch == 1
    if keep:
        assert (restored.first_batch, said) == (2, [])
        assert home.stored("pages", "aggregates", "new") == {f"p{i}": (30,) for i in range(3)}
    else:
        assert restored.first_batch == 0
        assert said_at == [(0, 1), (1, 1), (2, 1)]
        assert "start it with the checkpointLocation of the query that the savepoint was made of" in said[0]


class TestTheConstructor:
    """What the machine lacks is said when the backend is made, in one sentence."""

    def refused(self, spark: SparkSession, place: Path, **settings: Any) -> str:
        with pytest.raises(Invalid) as raised:
            StateBackend(str(place / "state"), spark=spark, **settings)
        text = str(raised.value)
        assert "\n" not in text
        assert not (place / "state").exists()
        return text

    def test_a_python_that_is_not_there(self, home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(home.spark.sparkContext, "pythonExec", "python-of-nobody")
        text = self.refused(home.spark, home.path)
        assert "PYSPARK_PYTHON names 'python-of-nobody' for Spark's workers, and there is no such program" in text
        assert f"set PYSPARK_PYTHON={sys.executable}" in text

    def test_a_python_without_dstl(self, home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
        bare = home.path / "python3"
        bare.write_text(f'#!/bin/sh\nexec {sys.executable} -S -E "$@"\n')
        bare.chmod(0o755)
        monkeypatch.setattr(home.spark.sparkContext, "pythonExec", str(bare))
        text = self.refused(home.spark, home.path)
        assert f"{bare}, which cannot import dstl (ModuleNotFoundError: No module named" in text
        assert f"set PYSPARK_PYTHON={sys.executable}" in text

    def test_another_python_that_has_it_is_taken(self, home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
        other = home.path / "python3"
        other.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
        other.chmod(0o755)
        monkeypatch.setattr(home.spark.sparkContext, "pythonExec", str(other))
        home.backend().close()

    def test_rocksdict(self, home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "rocksdict", None)
        assert "needs rocksdict: pip install 'dstl-pyspark[rocksdb]'" in self.refused(
            home.spark, home.path, table="rocksdb"
        )

    @pytest.mark.parametrize("version", ["4.0.2", "3.5.1", "5.0.0"])
    def test_pyspark(self, home: Home, monkeypatch: pytest.MonkeyPatch, version: str) -> None:
        monkeypatch.setattr(environment.pyspark, "__version__", version)
        assert f"PySpark {version} is too " in self.refused(home.spark, home.path)


def failing(rows: Any, keys: Any, states: Any) -> Any:
    raise RuntimeError("no luck with this one")


def test_the_typed_error_is_found_in_what_spark_raises_and_ends_the_log(
    home: Home, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    source = home.stream(SCHEMA)
    source.add(rows_of(0))
    with home.backend(parallelism=2) as backend:
        df = backend.groupBy(source.read(), "page").mapStates(failing, "n long", "n long", name="mine")
        with pytest.raises(StreamingQueryException) as raised:
            source.drain(df, backend)
    error = cause(raised.value)
    assert isinstance(error, UserCodeError)
    assert "'mine'" in str(error)
    assert "no luck with this one" in str(error)
    assert "in failing" in str(error), "the user's own traceback"

    def said() -> str | None:
        lines = [record.getMessage() for record in caplog.records if record.name.startswith("dstl")]
        return next((line for line in lines if "has failed" in line), None)

    line = wait_until(said, "the failure's line in the log")
    assert "UserCodeError: " in line
    assert "'mine'" in line
    assert len(line) < 700
    sys.excepthook(type(raised.value), raised.value, raised.value.__traceback__)  # as where nobody catches it
    *before, last = capsys.readouterr().err.splitlines()
    assert last in line
    assert "StreamingQueryException" in "".join(before)
    sys.excepthook(type(error), error, None)
    assert capsys.readouterr().err.count("UserCodeError") == 1
    assert "\n" not in line


def test_a_query_without_our_operators_is_not_touched(home: Home) -> None:
    source = home.stream(SCHEMA)
    source.add(rows_of(0))
    with home.backend(parallelism=2) as backend:
        backend.groupBy(source.read(), "page").agg(F.count("*").alias("n"))
        ran: list[int] = []

        def each(df: DataFrame, batch: int) -> None:
            ran.append(batch)

        writer = source.read().observe("mine", F.count(F.lit(1)).alias("n")).writeStream.foreachBatch(each)
        writer.option("checkpointLocation", str(home.path / "checkpoint")).trigger(availableNow=True)
        writer.start().awaitTermination()
    assert ran == [0]
