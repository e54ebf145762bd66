"""Metrics, the page and Spark's progress of a real query, looked at from outside while and after it runs."""

import time
import urllib.request
from typing import Any

import pytest
from home import Home
from prometheus_client.parser import text_string_to_metric_families
from pyspark.sql import functions as F

from dstl.metrics.registry import METRICS, Kind
from dstl.options import BatchingOptions, MetricsOptions
from dstl.spark import StateBackend
from dstl.spark.progress import StateProgress


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
        deadline = time.monotonic() + 30
        while len(told) < 3 and time.monotonic() < deadline:
            time.sleep(0.05)
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
