"""The state benchmarks run, print what the issue asks for, and their figures hang together."""

import json

import pytest

from bench import checkpoint, cost, memory, recovery, space


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


def test_cost(capsys) -> None:
    assert cost.main(["--state-mb", "2", "--changed-keys", "500", "--batches", "6", "--json"]) == 0
    found = _figures(capsys)
    ours, spark = found["dstl"], found["spark"]
    assert ours["usd_a_day"] == pytest.approx(ours["requests_usd"] + ours["storage_usd"])
    assert 1 <= ours["puts_a_batch"] < 4
    assert spark["puts_a_batch"] == 2 * 202
    assert spark["usd_a_day"] == pytest.approx(8640 * 202 * (2 * 0.005 + 13 * 0.0004) / 1000)
    assert found["ratio_spark_to_dstl"] > 20
    assert "× $0.005 per 1,000" in ours["formula"]


def test_memory(capsys) -> None:
    assert memory.main(["--state-mb", "4", "--json"]) == 0
    found = _figures(capsys)
    assert found["payload_bytes_per_key"] == 108
    assert 108 < found["dict_bytes_per_key"] < 300
    assert 0.7 < found["ratio_heap_to_dict"] < 2
    assert found["restore"]["peak_mb"] >= found["restore"]["restored_mb"] > 0
