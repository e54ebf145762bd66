"""The benchmark of windows, in its short form: both sides of a query, and the cost of eviction."""

import pytest

from bench import windows


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
