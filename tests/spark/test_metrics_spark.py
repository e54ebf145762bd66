"""Metrics, the page and Spark's progress of a real query, looked at from outside while and after it runs."""

import dataclasses
import logging
import urllib.request
from typing import Any

import pytest
from home import Home
from prometheus_client.parser import text_string_to_metric_families
from pyspark.sql import functions as F

from dstl.errors import Invalid
from dstl.metrics.registry import METRICS, Kind
from dstl.options import BatchingOptions, MetricsOptions
from dstl.spark import StateBackend
from dstl.spark.listener import CheckpointLog, CheckpointMetrics, CheckpointReport, RestoreReport
from dstl.spark.progress import StateProgress
from worlds.memory_recorder import MemoryRecorder
from worlds.waiting import wait_until


def get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=30) as answer:
        return str(answer.read().decode())


def scrape(backend: StateBackend) -> dict[str, float]:
    """Return the sum of the samples of each series."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(get(f"{backend.metrics_url}metrics")):
        for sample in family.samples:
            found[sample.name] = found.get(sample.name, 0.0) + sample.value
    return found


def test_a_query_is_seen_from_outside(home: Home) -> None:
    source, told = home.stream(), list[dict[str, Any]]()
    for batch in range(3):
        source.add([{"k": f"k{n}", "v": batch} for n in range(40)])
    backend = home.backend(
        parallelism=2, task_managers=2, batching=BatchingOptions(inline_threshold=0), metrics=MetricsOptions(port=0)
    )
    listener = StateProgress(backend, told.append)
    home.spark.streams.addListener(listener)
    try:
        assert "has made no checkpoint" in get(str(backend.metrics_url))
        totals = backend.groupBy(source.read(), "k").agg(F.count("*").alias("n"), name="totals")
        writer = source.writer(totals, backend).format("noop").outputMode("update")
        query = writer.trigger(processingTime="0 seconds").start()
        query.processAllAvailable()
        page = get(str(backend.metrics_url))
        assert page.count("s batch took") == 3 * 5, "each batch, in each chart"
        query.stop()
        found = scrape(backend)
        exposed = {metric.exposed for metric in METRICS.values()}
        known = {metric.series for metric in METRICS.values() if metric.kind is not Kind.HISTOGRAM}
        ends = ("_bucket", "_sum", "_count")
        assert {name for name in found if not name.endswith(ends)} <= known
        assert {name.rpartition("_")[0] for name in found if name.endswith(ends)} <= exposed
        assert found["dstl_checkpoints_completed_total"] == found["dstl_checkpoint_duration_seconds_count"] == 3
        assert found["dstl_task_managers"] == found["dstl_task_manager_up"] == 2
        assert found["dstl_upload_requests_total"] >= 6
        assert found["dstl_state_entries"] == 40
        assert found["dstl_resident_memory_bytes"] > 1e7
        page = get(str(backend.metrics_url))
        assert ">running<" in page.replace("<i></i>", ">")
        assert "<h3>totals</h3>" in page
        assert "2 partitions by k (string)" in page
        assert page.count(", pid ") == 2
        wait_until(lambda: len(told) >= 3, "what is told of three batches")
        last = told[-1]["stateOperators"][-1]
        assert (last["operatorName"], last["numRowsTotal"]) == ("totals", 40)
        assert last["commitTimeMs"] > 0
        assert last["customMetrics"]["dstlRequests"] >= 3
        assert last["memoryUsedBytes"] > 0
    finally:
        home.spark.streams.removeListener(listener)
        backend.close()
    with pytest.raises(OSError, match=r"refused|closed"):
        get(str(backend.metrics_url))


def checkpoint(seconds: float) -> CheckpointReport:
    return CheckpointReport(
        checkpoint_id=7,
        batch_id=5,
        seconds=seconds,
        requests=2,
        new_bytes=100,
        full_bytes=900,
        inlined=0,
        estimated_recovery_seconds=2.5,
    )


def test_a_slow_checkpoint_is_a_warning_and_an_alarm(caplog: pytest.LogCaptureFixture) -> None:
    alarms: list[CheckpointReport] = []
    listener = CheckpointLog(slow_after_s=1.0, on_slow=alarms.append)
    with caplog.at_level(logging.INFO, "dstl.checkpoints"):
        listener(checkpoint(0.5))
        listener(checkpoint(1.5))
    assert [record.levelname for record in caplog.records] == ["INFO", "WARNING"]
    assert (
        "checkpoint 7 of batch 5 took 1.500 s: 2 requests, 100 new bytes, 900 in all; about 2.5 s to recover"
        in caplog.text
    )
    assert [alarm.seconds for alarm in alarms] == [1.5]


def test_rows_that_were_dropped_as_late_are_said_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    report = dataclasses.replace(checkpoint(0.5), late_rows={"sessions": 3, "windows": 4})
    with caplog.at_level(logging.INFO, "dstl.checkpoints"):
        CheckpointLog()(report)
    assert [record.levelname for record in caplog.records] == ["INFO", "WARNING", "WARNING"]
    assert "operator 'windows' dropped 4 rows of batch 5" in caplog.text
    recorder = MemoryRecorder()
    CheckpointMetrics(recorder)(report)
    assert {name: n for name, n in recorder.counters.items() if "Late" in name} == {
        "numLateRecordsDropped.sessions": 3,
        "numLateRecordsDropped.windows": 4,
    }


def test_the_watermark_of_the_slowest_operator_is_said_and_shown(caplog: pytest.LogCaptureFixture) -> None:
    report = dataclasses.replace(checkpoint(0.5), watermarks={"sessions": 12_000, "windows": 9_500})
    with caplog.at_level(logging.INFO, "dstl.checkpoints"):
        CheckpointLog()(report)
    assert "about 2.5 s to recover; watermark 9500 ms since 1970" in caplog.text
    recorder = MemoryRecorder()
    CheckpointMetrics(recorder)(report)
    assert recorder.snapshot()["currentInputWatermark"] == 9_500


def test_a_restore_is_logged_with_what_it_read(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "dstl.checkpoints"):
        CheckpointLog()(RestoreReport(run_id="r", checkpoint_id=6, seconds=0.25, bytes=10, changes=3))
        CheckpointLog()(RestoreReport(run_id="s", checkpoint_id=None, seconds=0.25, bytes=0, changes=0))
    assert "restored an empty state in 0.250 s (0 bytes, 0 changes) for run s" in caplog.text
    assert "restored checkpoint 6 in 0.250 s (10 bytes, 3 changes) for run r" in caplog.text


def test_metrics_are_counted() -> None:
    recorder = MemoryRecorder()
    listener = CheckpointMetrics(recorder)
    listener(checkpoint(0.5))
    listener(checkpoint(1.5))
    listener(RestoreReport(run_id="r", checkpoint_id=6, seconds=0.25, bytes=10, changes=3))
    flat = recorder.snapshot()
    assert flat["numberOfCompletedCheckpoints"] == 2
    assert flat["checkpointSeconds.p99"] == 1.5
    assert flat["lastIncSizeOfNonMaterialization"] == 100
    assert flat["estimatedRecoverySeconds"] == 2.5
    assert flat["numRestores"] == 1


def test_a_threshold_of_nothing_is_refused() -> None:
    with pytest.raises(Invalid):
        CheckpointLog(slow_after_s=0)
