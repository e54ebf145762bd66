"""The benchmark ``trigger`` counts as late what began an interval behind its due time, and nothing else."""

from typing import Any

from bench.trigger import lateness, summary


def progress(second: float, took_ms: int) -> dict[str, Any]:
    stamp = f"2026-01-01T00:00:{second:06.3f}Z"
    return {"timestamp": stamp, "durationMs": {"triggerExecution": took_ms}}


def test_a_batch_is_due_at_the_next_multiple_behind_the_start_of_the_one_before() -> None:
    assert lateness([1000.0, 1500.0, 2003.0, 2500.0], 500.0) == [0.0, 3.0, 0.0]
    assert lateness([1001.0, 2600.0], 500.0) == [1100.0]


def test_late_is_who_began_an_interval_behind_and_over_is_who_took_longer_than_one() -> None:
    # The second takes 700 ms: the third begins 200 ms behind, which is over and not late.
    # After its 1.2 s the fourth is late.
    seen = [progress(1.0, 100), progress(1.5, 700), progress(2.2, 1200), progress(3.4, 100), progress(3.5, 100)]
    figures = summary(seen, 500.0)
    assert figures["batches"] == 4
    assert (figures["late"], figures["over"]) == (1, 2)
    assert figures["worst_start_ms"] == 900.0
    assert figures["batch_ms"] == {"p50": 700.0, "p99": 1200.0, "max": 1200.0}
