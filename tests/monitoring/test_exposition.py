"""The endpoint for Prometheus: a driver and its TaskManagers over real sockets, read by Prometheus's own parser."""

import asyncio
import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from dstl.errors import DstlError, Invalid
from dstl.metrics import MetricSet
from dstl.metrics.registry import METRICS, Kind
from dstl.monitoring.exposition import CONTENT_TYPE, DriverMetrics, Exposition, Labelled
from dstl.monitoring.server import PageServer, Reply, Route
from dstl.spark.listener import CheckpointMetrics
from dstl.store.memory import MemoryStore
from tests.simulation.faulty_store import Fault, FaultRule, FaultyStore
from worlds.service import Driver, Model
from worlds.waiting import wait_until

EXAMPLES = Path(__file__).parents[2] / "examples" / "monitoring"
SERIES = {
    name
    for metric in METRICS.values()
    for name in (
        [f"{metric.exposed}{end}" for end in ("_bucket", "_sum", "_count")]
        if metric.kind is Kind.HISTOGRAM
        else [metric.series]
    )
}
LABELS = {"location", "task_manager", "le"} | {metric.label for metric in METRICS.values()}


async def scrape(driver: Driver) -> dict[str, list[Any]]:
    """Return the samples of a scrape by series."""
    metrics = DriverMetrics(
        "s3://b/<job>", driver.recorder, await driver.service.task_manager_metrics(), driver.service.fleet.wanted
    )
    text = Exposition(metrics.labelled_samples).render().decode()
    found: dict[str, list[Any]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, []).append(sample)
    return found


async def test_a_scrape_of_the_driver_has_all_of_its_task_managers(seed: int) -> None:
    driver = Driver(MemoryStore(), seed=seed, operators={"counts": 4}, task_managers=2)
    await driver.start()
    tell = CheckpointMetrics(driver.recorder)
    try:
        model: Model = {}
        for batch in range(3):
            await driver.run_batch(
                "run-1", batch, {"counts": {f"key-{n}".encode(): b"v" * 100 for n in range(50)}}, model
            )
        for report in driver.reports:
            tell(report)
        found = await scrape(driver)
        assert found.keys() <= SERIES
        both = {f"tm-{n}" for n in (1, 2)}
        for series in ("dstl_state_bytes", "dstl_resident_memory_bytes", "dstl_process_cpu_seconds_total"):
            assert {sample.labels["task_manager"] for sample in found[series]} == both
            assert all(sample.value > 0 for sample in found[series])
        assert sum(sample.value for sample in found["dstl_state_entries"]) == 50
        assert sum(sample.value for sample in found["dstl_owned_key_groups"]) == 128
        # The first of these has to be an increase.
        assert [sample.value for sample in found["dstl_checkpoints_failed_total"]] == [0]
        assert [sample.value for sample in found["dstl_hedges_sent_total"]] == [0, 0]
        assert {sample.labels["operator"] for sample in found["dstl_state_bytes"]} == {"counts"}
        assert {sample.labels["location"] for samples in found.values() for sample in samples} == {"s3://b/<job>"}
        (count,) = found["dstl_checkpoint_duration_seconds_count"]
        (above_all,) = [s for s in found["dstl_checkpoint_duration_seconds_bucket"] if s.labels["le"] == "+Inf"]
        assert count.value == above_all.value == 3
        parts = {sample.labels["part"]: sample.value for sample in found["dstl_checkpoint_part_seconds_sum"]}
        (whole,) = found["dstl_checkpoint_duration_seconds_sum"]
        assert parts.keys() == {"persist", "assemble", "commit", "notify"}
        assert sum(parts.values()) == pytest.approx(whole.value)
        assert [s.value for s in found["dstl_task_managers"]] == [2]
        (last,) = (report for report in driver.reports[-1:])
        assert sum(last.state_rows.values()) == 50

        # One that hangs keeps its last values, and is seen to be silent.
        await driver.members["tm-1"].service.server.close()
        await asyncio.sleep(0.6)  # a poll is shown for half a second
        later = await scrape(driver)
        assert {s.labels["task_manager"] for s in later["dstl_task_manager_up"] if s.value == 1} <= {"tm-2"}
    finally:
        await driver.close()


async def test_a_failed_checkpoint_is_counted_and_told(seed: int) -> None:
    store = FaultyStore(MemoryStore(), seed=seed)
    driver = Driver(store, seed=seed, operators={"counts": 2}, inline_threshold=0)
    await driver.start()
    try:
        model: Model = {}
        await driver.run_batch("run-1", 0, {"counts": {b"a": b"1"}}, model)
        store.rules.append(FaultRule(Fault.UNAVAILABLE, "put", chance=1.0, only=".seg"))
        with pytest.raises(DstlError, match="failed"):
            await driver.run_batch("run-1", 1, {"counts": {b"a": b"2"}}, model)
        found = await scrape(driver)
        assert [sample.value for sample in found["dstl_checkpoints_failed_total"]] == [1]
        failed = driver.service.history[-1]
        assert (failed.kind, failed.batch_id) == ("failed", 1)
        assert "failed" in failed.error
    finally:
        await driver.close()


def expressions(node: object) -> Iterator[str]:
    match node:
        case dict():
            for name, value in node.items():
                if name in ("expr", "query") and isinstance(value, str):
                    yield value
                else:
                    yield from expressions(value)
        case list():
            for value in node:
                yield from expressions(value)


def test_dashboard_and_alerts_name_only_what_is_exposed() -> None:
    dashboard = json.loads((EXAMPLES / "dashboard.json").read_text())
    alerts = yaml.safe_load((EXAMPLES / "alerts.yml").read_text())
    found = [*expressions(dashboard), *expressions(alerts)]
    assert len(found) > 30
    named = {name for each in found for name in re.findall(r"\bdstl_\w+", each)}
    assert named <= SERIES
    by = {name.strip() for each in found for group in re.findall(r"by \(([^)]*)\)", each) for name in group.split(",")}
    shown = {
        name
        for panel in dashboard["panels"]
        for t in panel["targets"]
        for name in re.findall(r"{{(\w+)}}", t["legendFormat"])
    }
    assert by | shown <= LABELS
    for rule in alerts["groups"][0]["rules"]:
        assert set(re.findall(r"\$labels\.(\w+)", str(rule["annotations"]))) <= LABELS
        for name in re.findall(r"\bdstl_\w+", rule["annotations"]["action"]):
            assert name in SERIES | {metric.exposed for metric in METRICS.values()}
    assert yaml.safe_load((EXAMPLES / "prometheus.yml").read_text())["rule_files"] == ["alerts.yml"]


def test_panels_of_the_dashboard_lie_beside_each_other() -> None:
    taken = set()
    for panel in json.loads((EXAMPLES / "dashboard.json").read_text())["panels"]:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & taken
        assert max(x for x, _ in cells) < 24
        taken |= cells


def test_a_missing_library_is_named_with_its_extra() -> None:
    code = (
        "import sys; sys.modules['prometheus_client'] = None\n"
        "from dstl.monitoring.exposition import Exposition\nExposition(list)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    last = done.stderr.strip().splitlines()[-1]
    assert last.endswith("an endpoint for metrics needs prometheus_client: pip install 'dstl-pyspark[prometheus]'")


def get(url: str, host: str | None = None) -> tuple[int, str, str]:
    request = urllib.request.Request(url, headers={"Host": host} if host else {})
    try:
        with urllib.request.urlopen(request, timeout=5) as answer:
            return answer.status, answer.read().decode(), answer.headers["Content-Type"]
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode(), error.headers["Content-Type"]


def test_the_server_answers_its_routes_and_nobody_elses_names() -> None:
    recorder = MetricSet()
    recorder.increment('hedgesDenied.a"b\\c\nd')
    exposition = Exposition(lambda: [Labelled({}, recorder.sample())])
    routes: dict[str, Route] = {
        "/metrics": lambda _: Reply(exposition.render(), CONTENT_TYPE),
        "/bad": lambda _: Reply(b"", status=1 // 0),
    }
    server = PageServer(routes, "127.0.0.1", 0)
    try:
        status, text, kind = get(f"{server.url}metrics")
        assert (status, kind) == (200, CONTENT_TYPE)
        (family,) = text_string_to_metric_families(text)
        assert family.samples[0].labels == {"reason": 'a"b\\c\nd'}
        assert get(f"{server.url}nothing")[0] == 404
        assert get(f"{server.url}bad")[:2] == (500, "this request failed: the reason is in the log")
        assert get(f"{server.url}metrics", "evil.example:80")[0] == 421
        assert get(f"{server.url}metrics", "localhost:1")[0] == 200
        with pytest.raises(Invalid, match="choose another port"):
            PageServer({}, "127.0.0.1", server.port)
    finally:
        server.close()


def test_strangers_take_few_files_of_the_driver_and_keep_no_scraper_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prevents that any user of the host uses up the driver's descriptors with connections that hardly say a word."""
    monkeypatch.setattr("dstl.monitoring.server._SILENT_S", 1.0)
    server = PageServer({"/metrics": lambda _: Reply(b"ok")}, "127.0.0.1", 0)
    before, others = len(os.listdir("/proc/self/fd")), set(threading.enumerate())
    strangers = []
    try:
        for _ in range(150):
            strangers.append(socket.create_connection(("127.0.0.1", server.port)))
            strangers[-1].sendall(b"G")
            if len(strangers) % 50 == 0:
                assert get(f"{server.url}metrics")[0] == 200
        wait_until(lambda: len(os.listdir("/proc/self/fd")) - before - len(strangers) <= 33, "the others' end")
        assert len(set(threading.enumerate()) - others) <= 34
        # A byte now and then keeps none of the last ones: a request has so many seconds in all.
        last = strangers[-1]
        last.settimeout(0.1)
        began = time.monotonic()
        while time.monotonic() - began < 12:
            try:
                if last.recv(1) == b"":
                    break
            except TimeoutError:
                with suppress(OSError):
                    last.sendall(b"E")
        assert time.monotonic() - began < 12
    finally:
        for each in strangers:
            each.close()
        server.close()
