"""Benchmarks through Spark: how each makes its figures of what it has seen, and its short form."""

import argparse
import json
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from bench import changelog, parts, peers, realtime, trigger, windows
from bench._processor_time import processor_ms, thread_ms
from bench.latency import Arrival, Commit, commit_of, latencies
from dstl.checkpoint.report import CheckpointReport


def progress_of(batch: int, **ms: int) -> dict:
    return {"batchId": batch, "durationMs": {"triggerExecution": 100, "addBatch": 50, **ms}}


def test_tasks_that_run_at_once_share_the_time_and_the_store_is_not_ours() -> None:
    progress = [progress_of(batch, walCommit=12, commitOffsets=18) for batch in (3, 4, 5)]
    report = CheckpointReport(1, 3, 0.016, 1, 100, 100, 1, persist_s=0.002, assemble_s=0.001, commit_s=0.011)
    task = {"query": "q", "begin": 0.002, "worker": 0.001, "acknowledge": 0.0005, "calls": 3, "cpu": 0.0015}
    tasks = [{**task, "batch": batch} for batch in (3, 4, 5) for _ in range(4)]
    tasks.append({**task, "batch": 5, "fetch": 1.0, "write": 1.0, "rows": 1})
    found = parts.summary(progress, [(report, 20.0)] * 3, tasks, at_once=2)
    assert found["parts_ms"] == {
        "begin": 4.0,
        "fetch": 0.0,
        "write": 0.0,
        "acknowledge": 1.0,
        "worker": 2.0,
        "offsets": 12.0,
        "commit": 18.0,
        "persist": 2.0,
        "assemble": 1.0,
        "record": 11.0,
        "notify": 0.0,
    }
    assert (found["offsets_and_commit_ms"], found["store_ms"], found["ours_ms"]) == (10.0, 20.0, 17.0)
    assert (found["tasks_of_a_batch"], found["calls_of_a_batch"], found["tasks_cpu_ms"]) == (4, 12, 6.0)


def test_processor_time_of_a_thread_is_its_own() -> None:
    done, end = threading.Event(), threading.Event()

    def work() -> None:
        until = time.thread_time() + 0.2
        while time.thread_time() < until:
            pass
        done.set()
        end.wait(30)

    thread = threading.Thread(target=work, name="busy-one")
    thread.start()
    assert done.wait(30)
    assert 200 <= thread_ms("busy-one") < 400
    assert thread_ms("nobody") == 0
    end.set()
    thread.join()


@pytest.mark.spark
@pytest.mark.long
def test_a_batch_costs_what_it_touches(run_bench):
    """Tasks without rows read and write nothing, in batches without any row and with one."""
    figures = run_bench("parts", "--partitions", 4, "--batches", 4, "--warm-up", 3)
    none, one, each = figures["runs"]
    assert [run["rows"] for run in figures["runs"]] == ["none", "one", "each"]
    assert {run["tasks_of_a_batch"] for run in figures["runs"]} == {4}
    # Begin, open and acknowledge of each task; a read and a write of each that has a row.
    assert (none["calls_of_a_batch"], one["calls_of_a_batch"], each["calls_of_a_batch"]) == (12, 14, 20)
    assert none["parts_ms"]["fetch"] == none["parts_ms"]["write"] == 0 < each["parts_ms"]["fetch"]
    assert all(run["ours_ms"] > 0 and run["cpu_ms"]["driver_loop"] > 0 for run in figures["runs"])


BUSY = "import time; end = time.process_time() + 0.3\nwhile time.process_time() < end: pass\nprint('done'); input()"


def test_processor_time_is_that_of_this_process_and_of_what_it_has_started():
    before = processor_ms()
    with subprocess.Popen([sys.executable, "-c", BUSY], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as busy:
        assert busy.stdout.readline() == b"done\n"
        running = processor_ms()
        busy.communicate(b"\n", timeout=30)
    assert running["others"] - before["others"] >= 200
    end = time.process_time() + 0.2
    while time.process_time() < end:
        pass
    after = processor_ms()
    assert after["driver"] - running["driver"] >= 400  # its own, and the child's that it has waited for


@pytest.mark.spark
@pytest.mark.long
def test_every_series_and_load_has_figures(run_bench):
    figures = run_bench("task", "--partitions", 4, "--batches", 2, "--warm-up", 1, "--rows", 10)
    assert figures["tasks"] == 8
    for series in ("stateless", "vectorised", "processor"):
        for load in ("empty", "small"):
            assert figures[f"{load}_{series}"]["wall_ms"] > 0
    assert figures["empty_stateless"]["task_managers_cpu_ms"] == 0


def progress(second: float, took_ms: int) -> dict[str, Any]:
    stamp = f"2026-01-01T00:00:{second:06.3f}Z"
    return {"timestamp": stamp, "durationMs": {"triggerExecution": took_ms}}


def test_a_batch_is_due_at_the_next_multiple_behind_the_start_of_the_one_before() -> None:
    assert trigger.lateness([1000.0, 1500.0, 2003.0, 2500.0], 500.0) == [0.0, 3.0, 0.0]
    assert trigger.lateness([1001.0, 2600.0], 500.0) == [1100.0]


def test_late_is_who_began_an_interval_behind_and_over_is_who_took_longer_than_one() -> None:
    # The second takes 700 ms: the third begins 200 ms behind, which is over and not late.
    # After its 1.2 s the fourth is late.
    seen = [progress(1.0, 100), progress(1.5, 700), progress(2.2, 1200), progress(3.4, 100), progress(3.5, 100)]
    figures = trigger.summary(seen, 500.0)
    assert figures["batches"] == 4
    assert (figures["late"], figures["over"]) == (1, 2)
    assert figures["worst_start_ms"] == 900.0
    assert figures["batch_ms"] == {"p50": 700.0, "p99": 1200.0, "max": 1200.0}


def test_a_file_is_as_old_as_the_end_of_the_batch_that_has_read_its_last_event() -> None:
    arrivals = [Arrival(10.0, 5), Arrival(10.1, 5), Arrival(10.2, 5), Arrival(10.3, 5)]
    commits = [Commit(10.5, 5), Commit(10.6, 0), Commit(11.0, 10)]
    seen = latencies(arrivals, commits)
    assert [(at, round(took, 3), events) for at, took, events in seen] == [
        (10.5, 0.5, 5),
        (11.0, 0.9, 5),
        (11.0, 0.8, 5),
    ]


def test_a_batch_ends_when_its_trigger_has_run() -> None:
    progress = {"timestamp": "2026-01-01T00:00:01.500Z", "durationMs": {"triggerExecution": 250}, "numInputRows": 7}
    began = commit_of({**progress, "durationMs": {"triggerExecution": 0}}).at
    assert commit_of(progress) == Commit(pytest.approx(began + 0.25), 7)


def test_a_trigger_that_finds_a_checkpoint_on_its_way_passes() -> None:
    assert changelog.completed([0.5], 1.0, 10.0) == 10
    assert changelog.completed([1.5], 1.0, 10.0) == 5
    assert changelog.completed([0.5, 2.5], 1.0, 8.0) == 4
    assert changelog.completed([20.0], 1.0, 10.0) == 0


@pytest.mark.parametrize("table", ["heap", "rocksdb"])
def test_without_the_log_a_checkpoint_uploads_the_table(capsys: pytest.CaptureFixture[str], table: str) -> None:
    arguments = ["--state-mb", "1", "--changed-mb", "0.1", "--checkpoints", "2", "--store", "local", "--json"]
    assert changelog.main([*arguments, "--table", table]) == 0
    on, off = json.loads(capsys.readouterr().out.splitlines()[-1])["sizes"]
    assert (on["changelog"], off["changelog"]) == ("on", "off")
    # So small a log is in the manifest; a base has objects of its own.
    assert on["requests_p50"] == 1
    assert off["requests_p50"] >= 2
    assert 0 < on["checkpoint_ms"]["p50"] <= on["checkpoint_ms"]["max"]
    assert off["completed"] <= on["completed"]


def test_finding_what_is_due_does_not_cost_more_where_more_is_held():
    few, many = (min(windows.eviction(held, rounds=9)["cpu_ms"] for _ in range(3)) for held in (5_000, 250_000))
    assert many < 5 * few + 1


@pytest.mark.spark
@pytest.mark.long
def test_both_sides_of_every_query_have_figures(run_bench):
    short = ["--partitions", 2, "--events", 20000, "--batches", 2, "--keys", 500, "--held", 1000]
    figures = run_bench("windows", *short)
    assert [(each["query"], each["mode"]) for each in figures["runs"]] == [
        ("tumbling", "append"),
        ("tumbling", "update"),
        ("sliding", "append"),
        ("dedup", "append"),
    ]
    assert all(each["dstl"] > 0 and each["spark"] > 0 for each in figures["runs"])
    assert figures["eviction"][0]["held"] == 1000


@pytest.mark.spark
@pytest.mark.skipif(shutil.which("javac") is None, reason="javac is missing: the jar of dstl:// cannot be built")
@pytest.mark.long
def test_files(tmp_path: Path, run_bench: Any) -> None:
    arguments = ["--queries", "count", "--partitions", 3, "--batches", 5, "--latency-ms", 5]
    runs = run_bench("files", *arguments, "--work", tmp_path)["runs"]
    assert [(each["query"], each["partitions"], each["kind"]) for each in runs] == [
        ("count", 3, "spark"),
        ("count", 3, "dstl"),
    ]
    spark, dstl = runs
    assert dstl["requests_per_batch"] == 2
    assert spark["requests_per_batch"] > 2 * 3
    for each in runs:
        assert 0 < each["batch_ms"]["p50"] <= each["batch_ms"]["p99"]


@pytest.mark.long
@pytest.mark.spark
@pytest.mark.timeout(600)
def test_each_side_tells_how_old_rows_are_in_the_sink(capsys: pytest.CaptureFixture[str]) -> None:
    sides = ["dstl.keep", "spark_jvm"]
    short = ["--rounds", "1", "--seconds", "4", "--warm-up", "8", "--rate", "100", "--keys", "50", "--slots", "2"]
    assert realtime.main(["--sides", *sides, *short, "--partitions", "2", "--patience", "20", "--json"]) == 0
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])
    for found in (figures["dstl"]["keep"], figures["spark_jvm"]):
        assert 0 < found["p50"] <= found["p99"] <= found["max"]
        assert found["batches"] > 1
        assert found["missing_pct"] <= 1, "no row is lost, and none of the time is on its way still"
        assert {"addBatch", "walCommit", "commitOffsets"} <= found["parts_ms"].keys()
    assert figures["batches"].keys() == set(sides)
    assert {"persist", "commit"} <= figures["dstl"]["keep"]["checkpoint_ms"].keys()


@pytest.mark.parametrize("mode", peers.MODES)
def test_a_python_without_pyflink_is_named_with_what_it_says(tmp_path, mode: str) -> None:
    args = argparse.Namespace(pyflink=sys.executable, slots=1, interval_ms=1000, timeout_s=60.0)
    with pytest.raises(SystemExit, match=rf"in {mode} mode ended with 1:\n(.|\n)*No module named 'pyflink'"):
        peers.run_job(args, mode, tmp_path, tmp_path / "job")
