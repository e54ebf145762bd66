"""The main path through Spark itself: states, operators, restarts, refusals."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from pyspark import cloudpickle
from pyspark.errors import StreamingQueryException
from pyspark.sql import Row, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming import StatefulProcessor

from dstl.checkpoint.service import CheckpointReport
from dstl.errors import Invalid, UserCodeError
from dstl.options import BatchingOptions, CheckpointOptions, ClusterOptions
from dstl.runtime import system_runtime
from dstl.spark import StateBackend
from dstl.spark.restart import FixedDelay, run_with_restarts
from dstl.spark.saved_state.reader import find_checkpoint, read_state
from dstl.store import open_store

pytestmark = pytest.mark.spark

# Workers cannot import a test module: its classes travel by value, as those of a user's __main__ do.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

TOTAL = "k string, total long, batches int"


class Totals(StatefulProcessor):
    """Adds up v by key; a second state counts the batches in which the key was seen."""

    def init(self, handle: Any) -> None:
        self.total = handle.getValueState("total", "total long")
        self.seen = handle.getValueState("seen", "batches int")

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        total = (self.total.get() or (0,))[0] + sum(row.v for row in rows)
        batches = (self.seen.get() or (0,))[0] + 1
        self.total.update((total,))
        self.seen.update((batches,))
        yield Row(k=key[0], total=total, batches=batches)

    def close(self) -> None:
        pass


class PandasTotals(Totals):
    """The same in pandas style."""

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Any:
        total = (self.total.get() or (0,))[0] + sum(int(frame.v.sum()) for frame in rows)
        batches = (self.seen.get() or (0,))[0] + 1
        self.total.update((total,))
        self.seen.update((batches,))
        yield pd.DataFrame({"k": [key[0]], "total": [total], "batches": [batches]})


class Failing(Totals):
    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        if key[0] == "bad":
            raise RuntimeError("no luck with this one")
        yield from super().handleInputRows(key, rows, timerValues)


def rows_of_batch(batch: int, keys: int = 12) -> list[dict[str, Any]]:
    rows = [{"k": f"k{i % keys}", "v": batch * 100 + i} for i in range(40)]
    return [*rows, {"k": None, "v": batch}]


def expected_totals(batches: int) -> dict[str | None, tuple[int, int]]:
    totals: dict[str | None, tuple[int, int]] = {}
    for batch in range(batches):
        sums: dict[str | None, int] = {}
        for row in rows_of_batch(batch):
            sums[row["k"]] = sums.get(row["k"], 0) + row["v"]
        for key, value in sums.items():
            before = totals.get(key, (0, 0))
            totals[key] = (before[0] + value, before[1] + 1)
    return totals


def stored(location: Path, operator: str, state: str) -> dict[Any, Any]:
    async def read() -> dict[Any, Any]:
        store, runtime = open_store(str(location)), system_runtime()
        checkpoint = await find_checkpoint(store, runtime)
        return {row.key[0]: row.value async for row in read_state(store, runtime, checkpoint, operator, state)}

    return asyncio.run(read())


@pytest.mark.parametrize("style", ["row", "pandas"])
def test_processors_run_unchanged_in_both_styles(
    spark: SparkSession, stream: Callable[..., Any], tmp_path: Path, style: str
) -> None:
    source = stream()
    for batch in range(3):
        source.add(rows_of_batch(batch))
    with StateBackend(str(tmp_path / "state"), parallelism=3, spark=spark) as backend:
        run = backend.transform_with_state if style == "row" else backend.transform_with_state_in_pandas
        processor = Totals() if style == "row" else PandasTotals()
        source.drain(run(source.read(), by="k", processor=processor, output=TOTAL))
    totals = expected_totals(3)
    assert stored(tmp_path / "state", "operator-1", "total") == {key: (value,) for key, (value, _) in totals.items()}
    assert stored(tmp_path / "state", "operator-1", "seen") == {key: (seen,) for key, (_, seen) in totals.items()}
    last = {row[0]: row[1:] for row in source.output(TOTAL) if row[2] == 3}
    assert last == totals


def test_a_coalesce_behind_an_operator_is_named(
    spark: SparkSession, stream: Callable[..., Any], tmp_path: Path
) -> None:
    source = stream()
    source.add(rows_of_batch(0))
    with StateBackend(str(tmp_path / "state"), parallelism=3, spark=spark) as backend:
        totals = backend.transform_with_state(source.read(), by="k", processor=Totals(), output=TOTAL)
        with pytest.raises(StreamingQueryException, match=r"Invalid: one Spark task .*'operator-1'.* coalesce\(\)"):
            source.drain(totals.coalesce(1))


def test_a_second_backend_at_the_port_of_one_that_was_closed_is_called_by_the_same_workers(
    spark: SparkSession, stream: Callable[..., Any], tmp_path: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        cluster = ClusterOptions(port=free.getsockname()[1])
    source = stream()
    for batch in range(3):
        source.add(rows_of_batch(batch))
        with StateBackend(str(tmp_path / "state"), parallelism=2, spark=spark, cluster=cluster) as backend:
            source.drain(backend.transform_with_state(source.read(), by="k", processor=Totals(), output=TOTAL))
    assert {row[0]: row[1:] for row in source.output(TOTAL) if row[2] == 3} == expected_totals(3)


def test_two_operators_and_a_source_without_new_data_checkpoint_together(
    spark: SparkSession, stream: Callable[..., Any], tmp_path: Path
) -> None:
    # The second source ends earlier: without care Spark plans its operator away, and its acknowledgements with it.
    first, second = stream(), stream()
    for batch in range(3):
        first.add(rows_of_batch(batch))
    second.add(rows_of_batch(0))
    reports: list[CheckpointReport] = []
    with StateBackend(str(tmp_path / "state"), parallelism=3, spark=spark) as backend:
        backend.add_listener(lambda report: isinstance(report, CheckpointReport) and reports.append(report))
        one = backend.transform_with_state(first.read(), by="k", processor=Totals(), output=TOTAL, name="one")
        two = backend.transform_with_state(
            second.read(), by="k", processor=Totals(), output=TOTAL, name="two", parallelism=2
        )
        first.drain(one.union(two))
    assert [report.batch_id for report in reports] == [0, 1, 2]
    assert stored(tmp_path / "state", "one", "seen") == {k: (seen,) for k, (_, seen) in expected_totals(3).items()}
    assert stored(tmp_path / "state", "two", "seen") == {k: (seen,) for k, (_, seen) in expected_totals(1).items()}


def test_a_stateful_operator_over_another_one_and_over_a_join(
    spark: SparkSession, stream: Callable[..., Any], tmp_path: Path
) -> None:
    left, right = stream(), stream("k2 string, w long")
    for batch in range(2):
        left.add(rows_of_batch(batch))
        right.add([{"k2": f"k{i}", "w": 1} for i in range(6)] if batch == 0 else [{"k2": "nobody", "w": 1}])
    both = left.read().join(right.read(), F.col("k") == F.col("k2"), "inner").select("k", "v")
    with StateBackend(str(tmp_path / "state"), parallelism=2, spark=spark) as backend:
        inner = backend.transform_with_state(both, by="k", processor=Totals(), output=TOTAL, name="inner")
        again = inner.selectExpr("k", "cast(batches as long) as v")
        outer = backend.transform_with_state(again, by="k", processor=Totals(), output=TOTAL, name="outer")
        left.drain(outer)
    want = {key: value for key, value in expected_totals(2).items() if key in {f"k{i}" for i in range(6)}}
    assert stored(tmp_path / "state", "inner", "total") == {key: (value,) for key, (value, _) in want.items()}
    # The first operator reported 1 and then 2 batches for each key.
    assert stored(tmp_path / "state", "outer", "total") == dict.fromkeys(want, (3,))


def test_a_restart_goes_on_where_spark_does_with_another_parallelism(
    spark: SparkSession, stream: Callable[..., Any], tmp_path: Path
) -> None:
    source = stream()
    for run, parallelism in enumerate((3, 5, 2)):
        source.add(rows_of_batch(run))
        with StateBackend(str(tmp_path / "state"), parallelism=parallelism, spark=spark) as backend:
            source.drain(backend.transform_with_state(source.read(), by="k", processor=Totals(), output=TOTAL))
    totals = expected_totals(3)
    assert stored(tmp_path / "state", "operator-1", "total") == {key: (value,) for key, (value, _) in totals.items()}


def test_a_batch_that_spark_replays_after_the_manifest_is_applied_once(
    spark: SparkSession, stream: Callable[..., Any], tmp_path: Path
) -> None:
    # As if the crash fell between the manifest and Spark's commit: Spark's record of the last batch is gone.
    source = stream()
    for batch in range(3):
        source.add(rows_of_batch(batch))
    for _ in range(2):
        with StateBackend(str(tmp_path / "state"), parallelism=3, spark=spark) as backend:
            source.drain(backend.transform_with_state(source.read(), by="k", processor=Totals(), output=TOTAL))
        for path in (source.directory / "checkpoint" / "commits").glob("*2*"):
            path.unlink()
    totals = expected_totals(3)
    assert stored(tmp_path / "state", "operator-1", "seen") == {key: (seen,) for key, (_, seen) in totals.items()}


def test_a_second_action_on_the_same_batch_does_not_count_twice(
    spark: SparkSession, stream: Callable[..., Any], tmp_path: Path
) -> None:
    source = stream()
    for batch in range(2):
        source.add(rows_of_batch(batch))
    counts: list[tuple[int, int]] = []
    with StateBackend(str(tmp_path / "state"), parallelism=3, spark=spark) as backend:
        totals = backend.transform_with_state(source.read(), by="k", processor=Totals(), output=TOTAL)
        query = (
            totals.writeStream.foreachBatch(lambda df, batch: counts.append((df.count(), df.count())))
            .option("checkpointLocation", str(tmp_path / "checkpoint"))
            .trigger(availableNow=True)
            .start()
        )
        query.awaitTermination()
    assert counts == [(13, 13), (13, 13)]
    seen = {key: (seen,) for key, (_, seen) in expected_totals(2).items()}
    assert stored(tmp_path / "state", "operator-1", "seen") == seen


def test_a_dead_task_manager_between_batches_needs_no_restart(
    spark: SparkSession, stream: Callable[..., Any], tmp_path: Path
) -> None:
    source = stream()
    for batch in range(3):
        source.add(rows_of_batch(batch))
    restarts: list[int] = []
    with StateBackend(str(tmp_path / "state"), parallelism=2, spark=spark) as backend:

        def kill_once(report: Any) -> None:
            if isinstance(report, CheckpointReport) and report.batch_id == 0:
                os.kill(backend.task_manager_pids[0], signal.SIGKILL)

        backend.add_listener(kill_once)
        df = backend.transform_with_state(source.read(), by="k", processor=Totals(), output=TOTAL)
        run_with_restarts(
            source.writer(df).start, FixedDelay(3, 0.1), on_restart=lambda number, _: restarts.append(number)
        )
    totals = expected_totals(3)
    assert stored(tmp_path / "state", "operator-1", "total") == {key: (value,) for key, (value, _) in totals.items()}
    assert not restarts


def test_the_requests_of_a_checkpoint_do_not_depend_on_the_partitions(
    spark: SparkSession, stream: Callable[..., Any], tmp_path: Path
) -> None:
    requests: dict[tuple[int, int], set[int]] = {}
    for inline in (0, 64 << 10):
        for parallelism in (4, 64):
            source = stream()
            for batch in range(3):
                source.add(rows_of_batch(batch))
            found = requests.setdefault((inline, parallelism), set())
            with StateBackend(
                str(tmp_path / f"state-{inline}-{parallelism}"),
                parallelism=parallelism,
                batching=BatchingOptions(inline_threshold=inline),
                spark=spark,
            ) as backend:
                # Without the hedges, which follow the machine: a store that does not answer for a second gets one.
                backend.add_listener(
                    lambda r, f=found: isinstance(r, CheckpointReport) and f.add(r.requests - r.hedges)
                )
                source.drain(backend.transform_with_state(source.read(), by="k", processor=Totals(), output=TOTAL))
    assert requests == {(0, 4): {2}, (0, 64): {2}, (64 << 10, 4): {1}, (64 << 10, 64): {1}}


def test_an_error_in_user_code_names_key_and_operator_and_leaves_the_state(
    spark: SparkSession, stream: Callable[..., Any], tmp_path: Path
) -> None:
    source = stream()
    source.add(rows_of_batch(0))
    source.add([{"k": "bad", "v": 1}, {"k": "k1", "v": 1}])
    with StateBackend(str(tmp_path / "state"), parallelism=2, spark=spark) as backend:
        df = backend.transform_with_state(source.read(), by="k", processor=Failing(), output=TOTAL, name="failing")
        with pytest.raises(StreamingQueryException) as raised:
            source.drain(df)
    text = str(raised.value)
    assert "UserCodeError" in text
    assert "no luck with this one" in text
    assert "'failing'" in text
    assert "bad" in text
    totals = expected_totals(1)
    assert stored(tmp_path / "state", "failing", "total") == {key: (value,) for key, (value, _) in totals.items()}


@pytest.mark.drawn(2, group="refused")
def test_a_second_query_on_one_backend_is_refused(
    spark: SparkSession, stream: Callable[..., Any], tmp_path: Path
) -> None:
    one, two = stream(), stream()
    for source in (one, two):
        source.add(rows_of_batch(0))
    with StateBackend(str(tmp_path / "state"), parallelism=2, spark=spark) as backend:
        df = backend.transform_with_state(one.read(), by="k", processor=Totals(), output=TOTAL)
        one.drain(df)
        with pytest.raises(StreamingQueryException, match="one StateBackend per streaming query"):
            two.drain(df)


@pytest.mark.drawn(2, group="refused")
def test_a_location_of_another_query_and_another_max_parallelism_are_refused(
    spark: SparkSession, stream: Callable[..., Any], tmp_path: Path
) -> None:
    one, two = stream(), stream()
    for source in (one, two):
        source.add(rows_of_batch(0))
    with StateBackend(str(tmp_path / "state"), parallelism=2, spark=spark) as backend:
        one.drain(backend.transform_with_state(one.read(), by="k", processor=Totals(), output=TOTAL))
    with StateBackend(str(tmp_path / "state"), parallelism=2, spark=spark) as backend:
        df = backend.transform_with_state(two.read(), by="k", processor=Totals(), output=TOTAL)
        with pytest.raises(StreamingQueryException, match="belongs to query"):
            two.drain(df)
    one.add(rows_of_batch(1))
    with StateBackend(str(tmp_path / "state"), parallelism=2, max_parallelism=64, spark=spark) as backend:
        df = backend.transform_with_state(one.read(), by="k", processor=Totals(), output=TOTAL)
        with pytest.raises(StreamingQueryException, match=r"max_parallelism=128"):
            one.drain(df)


@pytest.mark.drawn(2, group="refused")
def test_a_new_location_for_an_old_query_is_refused_and_nothing_is_lost(
    spark: SparkSession, stream: Callable[..., Any], tmp_path: Path
) -> None:
    source = stream()
    source.add(rows_of_batch(0))
    with StateBackend(str(tmp_path / "state"), parallelism=2, spark=spark) as backend:
        source.drain(backend.transform_with_state(source.read(), by="k", processor=Totals(), output=TOTAL))
    source.add(rows_of_batch(1))
    with StateBackend(str(tmp_path / "elsewhere"), parallelism=2, spark=spark) as backend:
        df = backend.transform_with_state(source.read(), by="k", processor=Totals(), output=TOTAL)
        with pytest.raises(StreamingQueryException, match=r"batch 1 needs the checkpoint of batch 0"):
            source.drain(df)
    with StateBackend(str(tmp_path / "state"), parallelism=2, spark=spark) as backend:
        source.drain(backend.transform_with_state(source.read(), by="k", processor=Totals(), output=TOTAL))
    totals = expected_totals(2)
    assert stored(tmp_path / "state", "operator-1", "total") == {key: (value,) for key, (value, _) in totals.items()}


@pytest.mark.drawn(2, group="refused")
def test_an_incompatible_state_schema_is_refused_with_both_schemas(
    spark: SparkSession, stream: Callable[..., Any], tmp_path: Path
) -> None:
    class Other(Totals):
        def init(self, handle: Any) -> None:
            self.total = handle.getValueState("total", "total string")
            self.seen = handle.getValueState("seen", "batches int")

    source = stream()
    source.add(rows_of_batch(0))
    with StateBackend(str(tmp_path / "state"), parallelism=2, spark=spark) as backend:
        source.drain(backend.transform_with_state(source.read(), by="k", processor=Totals(), output=TOTAL))
    source.add(rows_of_batch(1))
    with StateBackend(str(tmp_path / "state"), parallelism=2, spark=spark) as backend:
        df = backend.transform_with_state(source.read(), by="k", processor=Other(), output=TOTAL)
        with pytest.raises(StreamingQueryException, match=r"bigint.*string"):
            source.drain(df)


class TestRefusedWhenDefined:
    """What is wrong with the definition is said before any query runs."""

    @pytest.fixture
    def backend(self, spark: SparkSession, tmp_path: Path) -> Iterator[StateBackend]:
        with StateBackend(str(tmp_path / "state"), parallelism=2, spark=spark) as backend:
            yield backend

    def test_a_key_column_that_does_not_exist(self, backend: StateBackend, stream: Callable[..., Any]) -> None:
        with pytest.raises(Invalid, match="no column 'nope' to group by; there are k, v"):
            backend.transform_with_state(stream().read(), by="nope", processor=Totals(), output=TOTAL)

    def test_an_output_schema_that_cannot_be_parsed(self, backend: StateBackend, stream: Callable[..., Any]) -> None:
        with pytest.raises(Invalid):
            backend.transform_with_state(stream().read(), by="k", processor=Totals(), output="k strin, total")

    def test_an_unknown_state_type(self, backend: StateBackend, stream: Callable[..., Any]) -> None:
        class Unknown(Totals):
            def init(self, handle: Any) -> None:
                handle.getValueState("total", "total nosuchtype")

        with pytest.raises((Invalid, UserCodeError), match=r"(?i)nosuchtype"):
            backend.transform_with_state(stream().read(), by="k", processor=Unknown(), output=TOTAL)

    def test_modes_names_and_parallelism(self, backend: StateBackend, stream: Callable[..., Any]) -> None:
        df = stream().read()
        for wrong in (
            {"output_mode": "complete"},
            {"time_mode": "sometimes"},
            {"name": "../up"},
            {"parallelism": 129},
            {"by": []},
        ):
            with pytest.raises(Invalid):
                backend.transform_with_state(**{"df": df, "by": "k", "processor": Totals(), "output": TOTAL, **wrong})

    def test_two_operators_of_one_name(self, backend: StateBackend, stream: Callable[..., Any]) -> None:
        df = stream().read()
        backend.transform_with_state(df, by="k", processor=Totals(), output=TOTAL, name="same")
        with pytest.raises(Invalid, match="two operators are called 'same'"):
            backend.transform_with_state(df, by="k", processor=Totals(), output=TOTAL, name="same")


def test_a_location_that_cannot_be_used_is_refused_before_any_query(spark: SparkSession) -> None:
    with pytest.raises(Invalid, match=r"cannot use /proc/nowhere/state: .*choose another location"):
        StateBackend("/proc/nowhere/state", spark=spark)
    with pytest.raises(Invalid):
        StateBackend("s3://", spark=spark)
    with pytest.raises(Invalid, match=r"clean_grace_s=60 is not above checkpoints\.timeout_s=600"):
        StateBackend("unused", checkpoints=CheckpointOptions(clean_grace_s=60), spark=spark)
    with pytest.raises(Invalid, match="memory"):
        StateBackend("memory://state", spark=spark)


def test_no_secret_is_in_what_spark_could_log(spark: SparkSession, stream: Callable[..., Any], tmp_path: Path) -> None:
    with StateBackend(str(tmp_path / "state"), parallelism=2, spark=spark) as backend:
        df = backend.transform_with_state(stream().read(), by="k", processor=Totals(), output=TOTAL)
        secret = backend._secret.reveal()
        shown = repr(backend) + repr(backend._secret) + df._jdf.queryExecution().toString()
        assert secret.hex() not in shown
        assert repr(secret) not in shown
        commands = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if path.exists()]
        assert not any(secret in command or secret.hex().encode() in command for command in commands)
