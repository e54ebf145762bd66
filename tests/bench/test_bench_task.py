"""The benchmark of tasks: processor time by kind of process, and its short form."""

import subprocess
import sys
import time

import pytest

from bench._processor_time import processor_ms

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
