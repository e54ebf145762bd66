"""From librdkafka's mock cluster of Kafka into Delta, Iceberg, a database and files, with kills: once each."""

from __future__ import annotations

import contextlib
import json
import random
import signal
import sqlite3
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Producer
from deltalake import DeltaTable
from home import Home
from pyiceberg.catalog.sql import SqlCatalog
from pyspark.errors import StreamingQueryException
from typer.testing import CliRunner

from dstl.cli.files import app as files_cli
from dstl.errors import Invalid
from dstl.spark import batch_stamp
from worlds.pages import DOCS, blocks

PAGES = ["home", "shop", "help", "cart"]


class Cluster:
    """A mock cluster of Kafka's protocol in this process; a topic ``visits`` of four partitions."""

    def __init__(self) -> None:
        self._producer = Producer({"bootstrap.servers": "mock", "test.mock.num.brokers": 1, "log_level": 2})
        (broker,) = self._producer.list_topics(timeout=10).brokers.values()
        self.servers = f"{broker.host}:{broker.port}"

    def send(self, pages: list[str]) -> None:
        for at, page in enumerate(pages):
            self._producer.produce("visits", key=str(at), value=page)
        assert self._producer.flush(10) == 0


@pytest.fixture
def cluster() -> Cluster:
    return Cluster()


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kills", [1, pytest.param(20, marks=pytest.mark.long)])
def test_a_driver_that_dies_between_sinks_neither_loses_nor_repeats_a_row(
    kills: int, cluster: Cluster, tmp_path: Path, rng: random.Random
) -> None:
    (code,) = (
        each.code for each in blocks((DOCS / "how-to/write-exactly-once.md").read_text()) if "file:" in each.mark
    )
    (tmp_path / "sinks.py").write_text(code)
    (tmp_path / "warehouse").mkdir()
    places = [rng.randrange(5) for _ in range(kills)] if kills > 5 else rng.sample(range(5), kills)
    sent: Counter[str] = Counter()
    for place in [*places, None]:
        pages = [rng.choice(PAGES) for _ in range(rng.randrange(41, 80))]
        cluster.send(pages)
        sent.update(pages)
        last = place is None
        job = [str(Path(__file__).with_name("sinks_job.py")), cluster.servers, str(tmp_path), str(sum(sent.values()))]
        job += ["0", "0"] if last else [str(rng.randrange(1, 3)), str(place)]
        with (tmp_path / "log").open("a") as log:
            done = subprocess.run([sys.executable, *job], stdout=log, stderr=log, timeout=240, check=False)
        said = (tmp_path / "log").read_text()[-3000:]
        assert done.returncode == (0 if last else -signal.SIGKILL), said
    want = Counter((page, n) for page, count in sent.items() for n in range(1, count + 1))
    for name, rows in contents(tmp_path).items():
        found = Counter((row["page"], row["n"]) for row in rows)
        assert found == want, f"{name}: repeated {found - want}, lost {want - found}"


def contents(directory: Path) -> dict[str, list[dict[str, Any]]]:
    files = [str(file) for file in directory.glob("files/*/*.json")]
    rows = [line for file in files for line in Path(file).read_text().splitlines()]
    # What is left to the collector is an error of whichever test comes next, since Python 3.13.
    with (
        contextlib.closing(SqlCatalog("shop", uri=f"sqlite:///{directory}/catalog.db")) as catalog,
        contextlib.closing(sqlite3.connect(directory / "visits.db")) as database,
    ):
        return {
            "delta": DeltaTable(directory / "delta").to_pyarrow_table().to_pylist(),
            "iceberg": catalog.load_table("shop.visits").scan().to_arrow().to_pylist(),
            "database": [{"page": page, "n": n} for page, n in database.execute("SELECT page, n FROM visits")],
            "files": [json.loads(row) for row in rows],
        }


def test_a_stamp_is_that_of_one_batch_and_of_no_other(home: Home) -> None:
    """Where a batch's number is not: with another checkpoint directory, and behind a rollback."""
    source = home.stream()
    seen: list[tuple[int, int]] = []

    def run(directory: str, fails_at: int = -1) -> list[tuple[int, int]]:
        seen.clear()

        def write(batch: Any, number: int) -> None:
            seen.append((number, batch_stamp(batch)))
            assert number != fails_at, "as if the driver died"
            batch.collect()

        writer = source.read().writeStream.foreachBatch(write).trigger(availableNow=True)
        query = writer.option("checkpointLocation", f"dstl://{home.path}/{directory}").start()
        with contextlib.suppress(StreamingQueryException):
            query.awaitTermination()
        return list(seen)

    for batch in range(2):
        source.add([{"k": "a", "v": batch}])
    first = run("one", fails_at=1)
    assert [number for number, _ in first] == [0, 1]
    again = run("one")
    assert again == first[1:], "a batch that is run again"
    source.add([{"k": "a", "v": 2}])
    third = run("one")
    assert CliRunner().invoke(files_cli, ["rollback", f"dstl://{home.path}/one", "1"]).exit_code == 0
    replayed = run("one")
    assert [number for number, _ in replayed] == [number for number, _ in third] == [2]
    elsewhere = run("two")
    assert [number for number, _ in elsewhere] == [0, 1, 2]
    stamps = [stamp for _, stamp in (*first, *third, *replayed, *elsewhere)]
    assert len({*stamps}) == len(stamps)
    with pytest.raises(Invalid, match="is for the function that foreachBatch calls"):
        batch_stamp(home.spark.range(1))
