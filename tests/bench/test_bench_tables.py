"""The benchmarks without Spark run, and their figures hang together."""

import importlib
import json
import re
from pathlib import Path

import pytest

from bench import checkpoint, cost, memory, recovery, row, space
from bench._figures import _rows

ROOT = Path(__file__).parents[2]


def _figures(capsys) -> dict:
    return json.loads(capsys.readouterr().out.strip().splitlines()[-1])


@pytest.mark.parametrize("table", ["heap", "rocksdb"])
def test_recovery(capsys, table: str) -> None:
    assert recovery.main(["--state-mb", "3", "--table", table, "--rounds", "1", "--batch-mb", "0.1", "--json"]) == 0
    found = _figures(capsys)
    assert {"state_mb", "log_mb", "restore_s", "raw_read_s", "no_changelog_restore_s"} <= set(found)
    assert found["ratio_to_raw"] == pytest.approx(found["restore_s"] / found["raw_read_s"])
    assert found["ratio_to_no_changelog"] == pytest.approx(found["restore_s"] / found["no_changelog_restore_s"])
    # RocksDB packs with lz4, which finds nothing in random hexadecimal digits.
    assert 1.3 < found["base_mb"] < (3 if table == "heap" else 4)
    assert 0.1 < found["log_mb"] < 0.5
    assert found["segments"] >= 2


def test_the_first_batch_behind_a_restore(capsys) -> None:
    arguments = ["--first-batch", "--state-mb", "3", "30", "--log-mb", "0.5", "--value-bytes", "2000"]
    assert recovery.main([*arguments, "--lookups", "5", "--json"]) == 0
    found = _figures(capsys)
    assert found["lookups"] == 5
    for size in ("3", "30"):
        opened, first, loaded = (found[name][size] for name in ("open_s", "first_batch_s", "all_loaded_s"))
        assert 0.063 * 0.7 < opened < first <= loaded
        # The log is a request, and so are the fetches that all is loaded by.
        assert 2 <= found["requests"][size] < 40
    with pytest.raises(SystemExit):
        recovery.main(["--state-mb", "3", "30"])


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
    job = found["job"]
    now, with_next, at_best, renames = (job[name] for name in cost.WAYS)
    assert now["puts_a_batch"] - with_next["puts_a_batch"] == 1
    assert 1 <= with_next["puts_a_batch"] < 4
    assert now["usd_a_day"] > now["requests_usd"] == pytest.approx(8640 * now["puts_a_batch"] * 0.005 / 1000)
    assert (at_best["puts_a_batch"], renames["puts_a_batch"], renames["gets_a_batch"]) == (202, 10 * 202, 5 * 202)
    assert renames["usd_a_day"] == pytest.approx(8640 * 202 * (10 * 0.005 + 5 * 0.0004) / 1000)
    assert at_best["ratio_to_dstl_now"] == pytest.approx(at_best["usd_a_day"] / now["usd_a_day"])
    assert found["month_usd"]["dstl_now"]["200_partitions"] == found["month_usd"]["dstl_now"]["4_partitions"]


def test_the_page_of_costs_has_what_the_benchmark_computes() -> None:
    lines = (ROOT / "dstl/docs/explanation/costs.md").read_text(encoding="utf-8").splitlines()
    columns = [(name, count) for name in cost.WAYS for count in (cost.PARTITIONS if "spark" in name else (1,))]
    for trigger_s in cost.TRIGGERS_S:
        (line,) = [each for each in lines if each.startswith(f"| {trigger_s} s |")]
        usd = [cost.month_usd(cost.WAYS[name], trigger_s, count) for name, count in columns]
        texts = [f"${each:,.0f}" if each >= 10 else f"${each:.2f}" for each in usd]
        assert line == f"| {trigger_s} s | {' | '.join(texts)} |"
    # Requests of a batch, as the figures at the top of the README have them.
    counts = [sum(cost.WAYS[name].requests(count)) for name in ("dstl_now", "spark_one_put") for count in (4, 64)]
    readme = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    (line,) = [each for each in readme if "requests of a batch" in each]
    assert [int(each) for each in re.findall(r"\d+", line)[2:6]] == counts


def test_memory(capsys) -> None:
    assert memory.main(["--state-mb", "2", "--keys", "60000", "--json"]) == 0
    found = _figures(capsys)
    assert found["payload_bytes_per_key"] == 108
    assert 108 < found["dict"]["bytes_per_key"] < 400
    # Of so few values the array that has just grown shows.
    assert 108 < found["heap"]["bytes_per_key"] < 1.5 * found["dict"]["bytes_per_key"]
    assert 50 < found["rocksdb"]["disk_bytes_per_key"] < 300
    assert all(found[kind]["fetch_us"] > 0 for kind in ("heap", "rocksdb"))
    assert found["restore"]["peak_mb"] >= found["restore"]["restored_mb"] > 0


def test_the_unit_of_a_rate_is_not_that_of_its_time() -> None:
    figures = {"checkpoint_ms": {"p50": 1}, "events_per_s": 1, "mb_per_hour": 1, "requests_per_batch": 1}
    assert [unit for _, _, unit in _rows(figures)] == ["ms", "/s", "MB/h", ""]


def test_row(capsys) -> None:
    assert row.main(["--keys", "1000", "--batch", "300", "--rounds", "2", "--profile", "--json"]) == 0
    captured = capsys.readouterr()
    found = json.loads(captured.out.splitlines()[-1])
    assert found["keys"] == 1000
    spent = found["us_per_key"]
    assert set(spent) == {"row", "tuple", "first", "get", "generator_floor", "loop_floor", "row_alone"}
    assert 0 < spent["loop_floor"] < spent["generator_floor"]
    assert 0 < spent["row_alone"] < spent["row"]
    assert spent["loop_floor"] < spent["get"] < spent["row"]
    assert "handleInputRows" in captured.err


def test_a_commit_that_rides_costs_one_request_and_one_wait_less(capsys: pytest.CaptureFixture[str]) -> None:
    main = importlib.import_module("bench.async").main
    assert main(["--batches", "25", "--warm-up", "5", "--partitions", "4", "--json"]) == 0
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert {"now", "with_next", "none"} <= set(figures)
    assert (figures["now"]["requests_per_batch"], figures["with_next"]["requests_per_batch"]) == (2, 1)
    assert figures["none"]["p50"] == 500
    assert figures["none"]["p50"] < figures["with_next"]["p50"] < figures["now"]["p50"]
    assert figures["with_next_keep"]["p50"] <= 1.05 * figures["none"]["p50"]
