"""The main path through Spark itself: states, operators, restarts, refusals."""

import asyncio
import socket
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from home import Home
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, Row
from pyspark.sql import functions as F
from pyspark.sql.streaming import StatefulProcessor

from dstl.checkpoint.report import CheckpointReport
from dstl.errors import Invalid, UserCodeError
from dstl.files.inspection import roll_back
from dstl.options import BatchingOptions, ClusterOptions, RocksDBOptions
from dstl.runtime import system_runtime
from dstl.spark import StateBackend, cause
from dstl.store import open_store

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


def totals(backend: StateBackend, rows: DataFrame, **more: Any) -> DataFrame:
    return backend.groupBy(rows, "k").transformWithState(Totals(), TOTAL, "append", "none", **more)


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


def test_a_second_backend_at_the_port_of_one_that_was_closed_is_called_by_the_same_workers(home: Home) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        cluster = ClusterOptions(port=free.getsockname()[1])
    source = home.stream()
    for batch in range(3):
        source.add(rows_of_batch(batch))
        with home.backend(parallelism=2, cluster=cluster) as backend:
            source.drain(totals(backend, source.read()), backend)
    assert {row[0]: row[1:] for row in source.output(TOTAL) if row[2] == 3} == expected_totals(3)


def test_a_port_that_another_driver_has_is_refused_by_its_option(home: Home) -> None:
    """It was a bare OSError."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(Invalid, match=rf"listen at 127.0.0.1:{port} .*address already in use\): .* cluster.port"):
            home.backend(cluster=ClusterOptions(port=port))


def test_options_of_rocksdb_reach_its_tables(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    """They did not, from anywhere: the defaults were all that there was."""
    scratch = home.path / "t"
    scratch.mkdir()
    monkeypatch.setenv("TMPDIR", str(scratch))
    source = home.stream()
    source.add(rows_of_batch(0))
    options = RocksDBOptions(block_bytes=4 << 10, max_write_buffers=5)
    with home.backend(parallelism=2, table="rocksdb", rocksdb=options) as backend:
        source.drain(totals(backend, source.read()), backend)
        (written,) = {path.read_text() for path in scratch.rglob("OPTIONS-*")}
    assert {"block_size=4096", "max_write_buffer_number=5"} <= {line.strip() for line in written.splitlines()}


def test_two_operators_and_a_source_without_new_data_checkpoint_together(home: Home) -> None:
    # The second source ends earlier: without care Spark plans its operator away, and no task of it runs.
    first, second = home.stream(), home.stream()
    for batch in range(3):
        first.add(rows_of_batch(batch))
    second.add(rows_of_batch(0))
    reports: list[CheckpointReport] = []
    with home.backend(parallelism=3) as backend:
        backend.add_listener(lambda report: isinstance(report, CheckpointReport) and reports.append(report))
        one = totals(backend, first.read(), name="one")
        two = totals(backend, second.read(), name="two", parallelism=2)
        first.drain(one.union(two), backend)
    assert [report.batch_id for report in reports] == [0, 1, 2]
    assert home.stored("one", "seen") == {k: (seen,) for k, (_, seen) in expected_totals(3).items()}
    assert home.stored("two", "seen") == {k: (seen,) for k, (_, seen) in expected_totals(1).items()}


def test_a_stateful_operator_over_another_one_and_over_a_join(home: Home) -> None:
    left, right = home.stream(), home.stream("k2 string, w long")
    for batch in range(2):
        left.add(rows_of_batch(batch))
        right.add([{"k2": f"k{i}", "w": 1} for i in range(6)] if batch == 0 else [{"k2": "nobody", "w": 1}])
    both = left.read().join(right.read(), F.col("k") == F.col("k2"), "inner").select("k", "v")
    with home.backend(parallelism=2) as backend:
        inner = totals(backend, both, name="inner")
        again = inner.selectExpr("k", "cast(batches as long) as v")
        outer = totals(backend, again, name="outer")
        left.drain(outer, backend)
    want = {key: value for key, value in expected_totals(2).items() if key in {f"k{i}" for i in range(6)}}
    assert home.stored("inner", "total") == {key: (value,) for key, (value, _) in want.items()}
    # The first operator reported 1 and then 2 batches for each key.
    assert home.stored("outer", "total") == dict.fromkeys(want, (3,))


def test_a_batch_whose_commit_is_taken_back_is_run_again_from_the_one_before(home: Home) -> None:
    """As after a crash between the sink's commit and Spark's: the sink skips the batch, and no task of it would run."""
    source = home.stream()
    for batch in range(3):
        source.add(rows_of_batch(batch))
    for again in (True, False):
        with home.backend(parallelism=3) as backend:
            source.drain(totals(backend, source.read()), backend)
        if again:
            root = f"dstl://{home.path}/state/_spark"
            asyncio.run(roll_back(root, 1, system_runtime(), open_store))
    expected = expected_totals(3)
    assert home.stored("operator-1", "seen") == {key: (seen,) for key, (_, seen) in expected.items()}


def test_a_task_that_fails_while_its_batch_is_run_again_fails_the_query_by_its_own_error(home: Home) -> None:
    class Failing(Totals):
        def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Any:
            raise RuntimeError("no such rate")

    source = home.stream()
    source.add(rows_of_batch(0))
    with home.backend(parallelism=2) as backend:
        df = backend.groupBy(source.read(), "k").transformWithState(Failing(), TOTAL, "append", "none")
        # The function reads nothing, so that the tasks run before the commit, and for it.
        unread = df.writeStream.foreachBatch(lambda frame, number: None)
        query = unread.option("checkpointLocation", backend.checkpoint_location).trigger(availableNow=True).start()
        with pytest.raises(StreamingQueryException) as raised:
            query.awaitTermination()
    error = cause(raised.value)
    assert isinstance(error, UserCodeError), raised.value
    assert "no such rate" in str(error)


@pytest.mark.parametrize(("inline", "parallelism"), [(0, 4), (64 << 10, 64)])
def test_the_requests_of_a_checkpoint_do_not_depend_on_the_partitions(
    home: Home, inline: int, parallelism: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All that is stored is counted, Spark's own files too; the figures of either way are those of all parallelisms."""
    monkeypatch.setenv("DSTL_MATERIALIZATION_INTERVAL_S", "3600")  # bases are published in a record of their own
    source, requests = home.stream(), set[int]()
    for batch in range(3):
        source.add(rows_of_batch(batch))
    with home.backend(parallelism=parallelism, batching=BatchingOptions(inline_threshold=inline)) as backend:
        # Without the hedges, which follow the machine: a store that does not answer for a second gets one.
        backend.add_listener(lambda r: isinstance(r, CheckpointReport) and requests.add(r.requests - r.hedges))
        source.drain(totals(backend, source.read()), backend)
    # With all of Spark's own files: the fence, and for each batch its offsets, and its commit with all else.
    # Where nothing is inlined there is one more, and one for either file of Spark's.
    stored = Counter(path.suffix for path in (home.path / "state").rglob("*.*"))
    assert (stored[".dstl"], stored[".seg"]) == (1 + 2 * 3, 0 if inline else 3 * 3), stored
    assert requests == {1 if inline else 2}


def test_an_old_query_s_directory_in_a_location_without_its_state_is_refused_and_nothing_is_lost(home: Home) -> None:
    source = home.stream()
    source.add(rows_of_batch(0))
    with home.backend(parallelism=2) as backend:
        source.drain(totals(backend, source.read()), backend)
    source.add(rows_of_batch(1))
    source.carry_over(home.path / "state", home.path / "elsewhere")
    with home.backend("elsewhere", parallelism=2) as backend:
        df = totals(backend, source.read())
        with pytest.raises(StreamingQueryException, match=r"checkpoint of batch 0, .* this location has none\. A"):
            source.drain(df, backend)
    with home.backend(parallelism=2) as backend:
        source.drain(totals(backend, source.read()), backend)
    expected = expected_totals(2)
    assert home.stored("operator-1", "total") == {key: (value,) for key, (value, _) in expected.items()}
