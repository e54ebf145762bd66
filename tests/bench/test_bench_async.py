"""``bench async``: half the requests, and a batch that waits for less."""

import importlib
import json

import pytest


def test_a_commit_that_rides_costs_one_request_and_one_wait_less(capsys: pytest.CaptureFixture[str]) -> None:
    main = importlib.import_module("bench.async").main
    assert main(["--batches", "25", "--warm-up", "5", "--partitions", "4", "--json"]) == 0
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert {"now", "with_next", "none"} <= set(figures)
    assert (figures["now"]["requests_per_batch"], figures["with_next"]["requests_per_batch"]) == (2, 1)
    assert figures["none"]["p50"] == 500
    assert figures["none"]["p50"] < figures["with_next"]["p50"] < figures["now"]["p50"]
    assert figures["with_next_keep"]["p50"] <= 1.05 * figures["none"]["p50"]
