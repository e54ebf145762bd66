"""The state benchmarks run, print what the issue asks for, and their figures hang together."""

import json

import pytest

from bench import checkpoint, recovery, space


def _figures(capsys) -> dict:
    return json.loads(capsys.readouterr().out.strip().splitlines()[-1])


@pytest.mark.parametrize("table", ["heap", "rocksdb"])
def test_recovery(capsys, table: str) -> None:
    if table == "rocksdb":
        pytest.importorskip("rocksdict")
    assert recovery.main(["--state-mb", "3", "--table", table, "--rounds", "1", "--batch-mb", "0.1", "--json"]) == 0
    found = _figures(capsys)
    assert {"state_mb", "log_mb", "restore_s", "raw_read_s", "no_changelog_restore_s"} <= set(found)
    assert found["ratio_to_raw"] == pytest.approx(found["restore_s"] / found["raw_read_s"])
    assert found["ratio_to_no_changelog"] == pytest.approx(found["restore_s"] / found["no_changelog_restore_s"])
    # RocksDB packs with lz4, which finds nothing in random hexadecimal digits.
    assert 1.3 < found["base_mb"] < (3 if table == "heap" else 4)
    assert 0.1 < found["log_mb"] < 0.5
    assert found["segments"] >= 2


def test_checkpoint(capsys) -> None:
    arguments = ["--state-mb", "2", "4", "--changed-mb", "0.6", "--batches", "12", "--store", "local"]
    assert checkpoint.main([*arguments, "--materialize-s", "0.1", "--pause-s", "0.02", "--json"]) == 0
    found = _figures(capsys)
    assert [size["state_mb"] for size in found["sizes"]] == [2.0, 4.0]
    for size in found["sizes"]:
        assert {"changed_mb", "checkpoint_ms", "put_ms_p50", "requests_per_checkpoint"} <= set(size)
        assert 0 < size["checkpoint_ms"]["p50"] <= size["checkpoint_ms"]["p99"]
        assert size["put_ms_p50"] > 0
        assert size["materializations"] >= 1
        assert 0 < size["sync_part_ms_max"] < 1000
        assert size["batch_delay_ms_max"] >= 0


@pytest.mark.parametrize(("workload", "most"), [("value", 1.3), ("window", 3.0)])
def test_space(capsys, workload: str, most: float) -> None:
    arguments = ["--workload", workload, "--state-mb", "4", "--min-log-mb", "0", "--rounds", "2"]
    assert space.main([*arguments, "--batches-per-state", "30", "--json"]) == 0
    found = _figures(capsys)
    assert {"live_mb", "full_checkpoint_mb_max", "ratio"} <= set(found)
    assert found["ratio"] == pytest.approx(found["full_checkpoint_mb_max"] / found["live_mb"])
    assert 1.0 <= found["ratio"] < most
    assert found["stored_mb_max"] >= found["full_checkpoint_mb_max"]
    assert found["materializations"] >= 3
