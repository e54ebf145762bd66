"""``bench realtime`` in a short form: every row comes to the sink once, with its age, on both kinds of sides."""

import json

import pytest

from bench import realtime


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
