"""``bench parts``: what a batch's time is made of, and its short form."""

import threading
import time

import pytest

from bench._processor_time import thread_ms
from bench.parts import summary
from dstl.checkpoint.report import CheckpointReport


def progress_of(batch: int, **ms: int) -> dict:
    return {"batchId": batch, "durationMs": {"triggerExecution": 100, "addBatch": 50, **ms}}


def test_tasks_that_run_at_once_share_the_time_and_the_store_is_not_ours() -> None:
    progress = [progress_of(batch, walCommit=12, commitOffsets=18) for batch in (3, 4, 5)]
    report = CheckpointReport(1, 3, 0.016, 1, 100, 100, 1, persist_s=0.002, assemble_s=0.001, commit_s=0.011)
    task = {"query": "q", "begin": 0.002, "worker": 0.001, "acknowledge": 0.0005, "calls": 3, "cpu": 0.0015}
    tasks = [{**task, "batch": batch} for batch in (3, 4, 5) for _ in range(4)]
    tasks.append({**task, "batch": 5, "fetch": 1.0, "write": 1.0, "rows": 1})
    found = summary(progress, [(report, 20.0)] * 3, tasks, at_once=2)
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
