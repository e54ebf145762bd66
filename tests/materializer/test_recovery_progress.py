"""What a restore says of itself while it runs."""

import itertools

from materializer.restore.progress import (
    LogLine,
    ProgressBar,
    ProgressMetrics,
    RestoreProgress,
    RestoreStatus,
    combine,
    describe,
)
from worlds.materialization import EAGER, World
from worlds.memory_recorder import MemoryRecorder


def test_rate_and_time_to_go_follow_the_last_seconds() -> None:
    progress = RestoreProgress({"a": 1000, "b": 1000}, 100.0)
    assert progress.status(100.0) == RestoreStatus(0, 2000, 0.0, 0.0, None, {"a": (0, 1000), "b": (0, 1000)})
    progress.add("a", 100, 101.0)
    status = progress.status(101.0)
    assert (status.rate, status.eta_s) == (100.0, 19.0)
    for second in range(102, 130):
        progress.add("a" if second < 110 else "b", 30, float(second))
    status = progress.status(129.0)
    assert 29.0 <= status.rate <= 31.0
    assert status.operators["a"][0] == 340
    progress.more("b", 500)
    assert progress.status(129.0).total == 2500
    assert progress.status(130.0, finished=True).finished


def test_nothing_to_do_is_done() -> None:
    status = RestoreProgress({}, 0.0).status(1.0)
    assert status.eta_s == 0.0
    assert "100 %" in describe(status)


def test_a_line_comes_every_few_seconds_and_at_the_end_of_a_long_restore() -> None:
    lines: list[str] = []
    line = LogLine(5.0, lines.append)
    progress = RestoreProgress({"a": 100}, 0.0)
    for second in range(1, 13):
        progress.add("a", 8, float(second))
        line(progress.status(float(second)))
    line(progress.status(12.5, finished=True))
    assert len(lines) == 3
    assert lines[0].startswith("restoring: ")
    assert "to go" in lines[0]
    assert lines[-1].startswith("restored: ")
    quick: list[str] = []
    LogLine(5.0, quick.append)(progress.status(1.0, finished=True))
    assert quick == []


def test_a_bar_shows_every_operator() -> None:
    progress = RestoreProgress({"a": 100, "b": 50}, 0.0)
    with ProgressBar() as bar:
        progress.add("a", 40, 1.0)
        bar(progress.status(1.0))
        bar(progress.status(2.0))
        assert [(task.description, task.completed, task.total) for task in bar._progress.tasks] == [
            ("a", 40, 100),
            ("b", 0, 50),
        ]


async def test_a_restore_reports_every_byte_it_expects(seed: int) -> None:
    async with World(seed, options=EAGER) as world:
        await world.start(1)
        await world.batches(5, 40)
        seen: list[RestoreStatus] = []
        await world.content_of(world.newest, 1, seen.append)
        assert len(seen) > 2
        assert seen[-1].finished
        assert seen[-2].done == seen[-2].total == seen[-1].total > 0
        assert all(a.done <= b.done for a, b in itertools.pairwise(seen))
        assert set(seen[-1].operators) == {"left", "right"}


def test_several_restores_together_end_with_the_last() -> None:
    first = RestoreStatus(50, 100, 2.0, 25.0, 2.0, {"a": (50, 100)}, False)
    second = RestoreStatus(30, 60, 3.0, 10.0, 3.0, {"a": (10, 20), "b": (20, 40)}, False)
    both = combine([first, second])
    assert both == RestoreStatus(80, 160, 3.0, 35.0, 3.0, {"a": (60, 120), "b": (20, 40)}, False)
    unknown = RestoreStatus(0, 60, 0.1, 0.0, None, {"b": (0, 60)}, False)
    assert combine([first, unknown]).eta_s is None
    done = RestoreStatus(60, 60, 4.0, 15.0, 0.0, {"b": (60, 60)}, True)
    assert combine([first, done]).eta_s == 2.0
    assert combine([done, done]).finished


def test_progress_is_kept_as_gauges() -> None:
    recorder = MemoryRecorder()
    ProgressMetrics(recorder)(RestoreStatus(50, 100, 2.0, 25.0, None, {}, False))
    assert recorder.gauges["restoredBytes"] == 50
    assert recorder.gauges["bytesToRestore"] == 100
    assert recorder.gauges["restoreEtaSeconds"] == -1
