"""``bench latency`` finds out when each file was committed; ``bench changelog`` what a checkpoint without log takes."""

import json

import pytest

from bench import changelog
from bench.latency import Arrival, Commit, commit_of, latencies


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
    if table == "rocksdb":
        pytest.importorskip("rocksdict")
    arguments = ["--state-mb", "1", "--changed-mb", "0.1", "--checkpoints", "2", "--store", "local", "--json"]
    assert changelog.main([*arguments, "--table", table]) == 0
    on, off = json.loads(capsys.readouterr().out.splitlines()[-1])["sizes"]
    assert (on["changelog"], off["changelog"]) == ("on", "off")
    # So small a log is in the manifest; a base has objects of its own.
    assert on["requests_p50"] == 1
    assert off["requests_p50"] >= 2
    assert 0 < on["checkpoint_ms"]["p50"] <= on["checkpoint_ms"]["max"]
    assert off["completed"] <= on["completed"]
