"""The page: what it says of each state of a job, that data stays data, and how its figures are computed."""

import re
import subprocess
import sys
from html.parser import HTMLParser

import pytest

from dstl.checkpoint.manifest.history import CheckpointHistory, HistoryEntry
from dstl.metrics import MetricSet
from dstl.monitoring.charts import HEIGHT, WIDTH, bar_chart, ceiling
from dstl.monitoring.cost import cost_per_day
from dstl.monitoring.page import Page, assets, quantile
from dstl.monitoring.skew import operator_sizes
from dstl.monitoring.store_reader import StoreReader
from dstl.monitoring.text import age_text, seconds_text, size_text, time_text
from dstl.options import CheckpointOptions
from dstl.runtime import SystemClock
from dstl.store.memory import MemoryStore
from tests.simulation.virtual_time import seeded_runtime
from worlds.overviews import GROUPS, NASTY, SCENES, newest
from worlds.service import Driver, Model


class Reader(HTMLParser):
    """Collects elements, attributes and text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.words: list[str] = []
        self.feed(text)
        self.text = re.sub(r"\s+", " ", "".join(self.words))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "link"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def shown(scene: str, **asked: str) -> Reader:
    reply = Page(2.0).render(SCENES[scene], asked)
    assert (reply.status, reply.content_type) == (200, "text/html; charset=utf-8")
    reader = Reader(reply.body.decode())
    assert reader.open == []
    return reader


@pytest.mark.parametrize("scene", SCENES)
def test_what_comes_from_data_is_never_markup(scene: str) -> None:
    page = shown(scene)
    assert {tag for tag, _ in page.tags} & {"img", "iframe", "object", "style"} == set()
    assert [attrs.get("src") for tag, attrs in page.tags if tag == "script"] == ["page.js"]
    assert not [name for _, attrs in page.tags for name in attrs if name.startswith("on") or name == "style"]
    if scene in ("running", "empty", "failed"):
        assert NASTY in page.text
    # Nothing is fetched from elsewhere.
    links = [value for _, attrs in page.tags for name, value in attrs.items() if name in ("src", "href") and value]
    assert set(links) <= {"page.js", "page.css", "data:,", "?rows=all"}
    assert "http" not in "".join((_asset("page.css"), _asset("page.js")))


def _asset(name: str) -> str:
    return assets()[f"/{name}"]({}).body.decode()


def test_each_state_says_in_a_word_how_the_job_is() -> None:
    words = {scene: next(word for word in _states(scene)) for scene in SCENES}
    assert words == {
        "running": "running",
        "restoring": "restoring",
        "failed": "last checkpoint failed",
        "empty": "empty",
        "many": "running",
        "stored": "as stored",
        "first": "running",
    }
    assert "Restoring: 412 MB of 633 MB" in shown("restoring").text
    failed = shown("failed").text
    assert "The checkpoint of batch 41 failed after 31.4 s" in failed
    assert "no answer within 30 s" in failed
    assert "Record 17 cannot be read" in failed
    assert "does not answer" in failed
    assert "No query has used" in shown("empty").text
    assert "The store does not know them" in shown("stored").text
    running = shown("running").text
    assert "8.3× the mean" in running
    assert f"4 partitions by aircraft, {NASTY} (string)" in running
    assert "A batch takes" in running
    assert "by the first 10 s" in shown("first").text
    stored = shown("stored").text
    assert "A batch takes" not in stored
    assert "Spark's batch" not in stored


def _states(scene: str) -> list[str]:
    text = Page(2.0).render(SCENES[scene], {}).body.decode()
    return re.findall(r'<div class="state \w+"><i></i>([^<]+)</div>', text)


def test_a_long_history_shows_its_end_until_all_is_asked_for() -> None:
    def bars(page: Reader) -> int:
        return sum(tag == "g" for tag, _ in page.tags)

    few, every = shown("many"), shown("many", rows="all")
    rows = [sum(tag == "tr" for tag, _ in page.tags) for page in (few, every)]
    assert rows[0] < 40 < 500 < rows[1]
    assert bars(few) == 5 * 240 + 2 * GROUPS
    assert bars(every) > 5 * 500
    part = Page(2.0).render(SCENES["many"], {"part": "1"}).body.decode()
    assert "<html" not in part
    assert "<header>" in part


def test_bars_stay_within_their_chart_and_add_up() -> None:
    chart = bar_chart([({"a": 1.0, "b": 3.0}, "x"), ({}, "y"), ({"a": 4.6, "b": 0.0}, "z")], str, {1: "failed"})
    assert chart.ticks == ("5.0", "2.5", "0.0")
    first, flagged, last = chart.columns
    assert [round(bar.height) for bar in first.bars] == [20, 60]
    assert [bar.kind for bar in last.bars] == ["a"]
    assert [(bar.kind, bar.height) for bar in flagged.bars] == [("failed", HEIGHT)]
    for scene_bars in (column.bars for column in chart.columns):
        for bar in scene_bars:
            assert 0 <= bar.x <= bar.x + bar.width <= WIDTH
            assert -0.001 <= bar.y <= bar.y + bar.height <= HEIGHT + 0.001
    assert bar_chart([], str).is_empty
    assert [ceiling(value) for value in (0, 0.9, 1, 1.1, 2.2, 3, 7, 1000, 1001)] == [1, 1, 1, 2, 2.5, 5, 10, 1000, 2000]


def test_sizes_of_key_groups_add_up_to_what_the_checkpoint_holds() -> None:
    checkpoint = newest(60)
    sizes = operator_sizes(checkpoint)
    assert sum(sum(each.bases) for each in sizes) == sum(handle.size for handle in checkpoint.materialized)
    assert sum(sum(each.log) for each in sizes) == pytest.approx(sum(s.segment[1] for s in checkpoint.segments))
    uneven, even = sizes
    assert (uneven.largest, uneven.segments, uneven.base_objects) == (77, 20, 1)
    assert uneven.skew > 5 > 3 > even.skew > 1
    twice = checkpoint.model_copy(update={"segments": (checkpoint.segments[0], checkpoint.segments[0])})
    assert sum(sum(each.log) for each in operator_sizes(twice)) == pytest.approx(checkpoint.segments[0].segment[1])


def test_a_day_costs_what_the_formula_says() -> None:
    made = [HistoryEntry(kind="checkpoint", at=100.0 + 60 * n, requests=2) for n in range(11)]
    cost = cost_per_day(made, 30 * 10**9)
    assert cost is not None
    assert cost.requests == pytest.approx(2 * 1440 / 1000 * 0.005)
    assert cost.storage == pytest.approx(0.023)
    assert cost.formula == "2,880 requests a day × $0.005 per 1,000 + 30.000 GB × $0.023 a month ÷ 30"
    assert cost.seconds == 600
    soon = cost_per_day(made[:2], 30 * 10**9)
    assert soon is not None
    assert (soon.requests, soon.seconds) == (pytest.approx(cost.requests), 60)
    assert cost_per_day(made[:1], 1) is None
    assert cost_per_day([], 1) is None


def test_quantiles_are_bounds_of_buckets() -> None:
    metrics = MetricSet()
    for _ in range(99):
        metrics.observe("uploadLatenciesNanos", 0.04e9)
    metrics.observe("uploadLatenciesNanos", 7e9)
    sample = metrics.sample()
    assert quantile(sample, "uploadLatenciesNanos", 0.5) == pytest.approx(0.05)
    assert quantile(sample, "uploadLatenciesNanos", 0.999) == pytest.approx(10)
    assert quantile(sample, "uploadSizes", 0.5) is None


def test_numbers_are_written_as_people_write_them() -> None:
    assert [size_text(n) for n in (0, 999, 1000, 99_949, 99_951, 999_499, 999_501, 512e9, 2e12)] == [
        "0 B", "999 B", "1.0 kB", "99.9 kB", "100 kB", "999 kB", "1.0 MB", "512 GB", "2.0 TB",
    ]  # fmt: skip
    assert [time_text(s) for s in (0, 253_402_300_799, 253_402_300_800)] == [
        "1970-01-01 00:00:00Z", "9999-12-31 23:59:59Z", "253402300800 s",
    ]  # fmt: skip
    assert [seconds_text(s) for s in (None, 0.0, 0.0051, 0.24, 1.25, 31.4, 300)] == [
        "-", "0 ms", "5.1 ms", "240 ms", "1.25 s", "31.4 s", "5 min",
    ]  # fmt: skip
    assert [age_text(s) for s in (-3, 41, 600, 12_000, 1_036_800)] == ["0 s", "41 s", "10 min", "3 h 20 min", "12 d"]


def test_the_history_is_bounded_and_a_partial_entry_is_replaced() -> None:
    history = CheckpointHistory(3)
    history.learn([HistoryEntry(kind="restore", at=1.0)])
    history.learn([HistoryEntry(kind="restore", at=2.0)])
    for number in range(1, 4):
        history.add(HistoryEntry(kind="checkpoint", at=number, checkpoint_id=number))
        history.add(HistoryEntry(kind="checkpoint", at=number, checkpoint_id=number, seconds=1.0))
    assert [(entry.checkpoint_id, entry.seconds) for entry in history.entries] == [(1, 1.0), (2, 1.0), (3, 1.0)]
    # A restore of a checkpoint does not take the place of that checkpoint.
    history.add(HistoryEntry(kind="checkpoint", at=4, checkpoint_id=4))
    history.add(HistoryEntry(kind="restore", at=5, checkpoint_id=4, seconds=1.0))
    assert [(entry.kind, entry.checkpoint_id) for entry in history.entries][-2:] == [("checkpoint", 4), ("restore", 4)]


async def test_the_store_alone_tells_what_a_driver_before_has_seen(seed: int) -> None:
    """Two drivers, one after the other: the second's last manifest tells of the first's checkpoints, now deleted."""
    store, model = MemoryStore(), Model()
    options = CheckpointOptions(task_manager_timeout_s=5.0, retained=2)
    batch = 0
    for run in ("run-1", "run-2"):
        driver = Driver(store, seed=seed + batch, operators={"counts": 2}, checkpoints=options)
        await driver.start()
        try:
            for _ in range(12):
                await driver.run_batch(run, batch, {"counts": {b"a": str(batch).encode()}}, model)
                batch += 1
        finally:
            await driver.close()
    overview = await StoreReader(store, seeded_runtime(seed, SystemClock())).overview()
    kinds = [(entry.kind, entry.batch_id) for entry in overview.history]
    before = [("restore", 0), *(("checkpoint", n) for n in range(12))]
    assert kinds == [*before, ("restore", 12), *(("checkpoint", n) for n in range(12, 24))]
    # Those from the newest record with the whole index of Spark's files on: it is written every ten batches.
    assert 2 <= len(overview.retained) <= 12
    retained = [entry.batch_id for entry in overview.completed][-len(overview.retained) :]
    assert retained == list(range(24 - len(retained), 24))
    *told, last = overview.completed
    # What a driver's last checkpoint took in all, nobody has written.
    assert [entry.batch_id for entry in told if entry.seconds is None] == [11]
    for entry in told:
        if entry.seconds is None:
            continue
        parts = [entry.persist_s, entry.assemble_s, entry.commit_s, entry.notify_s]
        assert sum(part or 0.0 for part in parts) == pytest.approx(entry.seconds, abs=0.001)
        assert entry.requests >= 1
    assert (last.seconds, last.persist_s is None) == (None, False)
    assert "as stored" in Page(2.0).render(overview, {}).body.decode()


def test_a_missing_template_library_is_named_with_its_extra() -> None:
    code = "import sys; sys.modules['jinja2'] = None\nfrom dstl.monitoring.page import Page\nPage(1.0)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stderr.strip().splitlines()[-1].endswith("the page needs jinja2: pip install 'dstl-pyspark[ui]'")
