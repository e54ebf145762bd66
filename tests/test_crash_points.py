"""Every named crash point in real processes: killed there, and stopped there to go on when another has its place."""

import ast
import asyncio
import os
import random
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import pytest

from dstl.checkpoint.savepoint.deletion import list_savepoints
from dstl.checkpoint.upkeep.verification import verify_location
from dstl.crash_points import POINTS, reach
from dstl.runtime import system_runtime
from dstl.store.local import LocalStore
from worlds.crashing_query import Query, expected

ROOT = Path(__file__).parents[1]
WAYS = ("kill", "stop")
BATCHES = 10
WAITS: tuple[Mapping[str, str], ...] = ({}, {"commit": "with-next"}, {"commit": "with-next", "sources": "keep"})
"""When a batch waits for its records."""


def test_every_point_is_reached_at_one_place_and_by_name() -> None:
    found: Counter[str] = Counter()
    for package in ("dstl", "materializer", "handles"):
        for path in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "reach":
                    (argument,) = node.args
                    assert isinstance(argument, ast.Constant)
                    found[argument.value] += 1
    assert found == dict.fromkeys(POINTS, 1)
    assert len(POINTS) == 48


def test_nothing_happens_where_no_test_has_named_a_point() -> None:
    for point in POINTS:
        reach(point)


def live_through(directory: Path, point: str, way: str, hit: int, files: Mapping[str, str]) -> Query:
    """Run the scenario: batches, a savepoint, an end, and batches with fewer TaskManagers."""
    location = directory / "state"
    orphans = location / "probe"
    orphans.mkdir(parents=True, mode=0o700)
    for number in range(3):
        orphan = orphans / f"{number:032x}"
        orphan.write_bytes(b"left by a crash")
        os.utime(orphan, (1_700_000_000, 1_700_000_000))
    query = Query(directory, point, way, hit, files)
    try:
        for batch in range(BATCHES):
            if batch == 2:
                query.savepoint("mine")
            if batch == 4:
                query.restart(1)
            query.run_batch(batch)
            # So that materializations end between the batches that tell of them.
            time.sleep(0.1)
        query.run_batch(BATCHES)
    finally:
        query.close()
    return query


async def look_at(location: str) -> None:
    store = LocalStore(location)
    found = await verify_location(store, system_runtime())
    assert found.problems == (), found.problems
    for savepoint in await list_savepoints(store, system_runtime()):
        assert savepoint.state in ("complete", "incomplete")
    await store.close()


def check(directory: Path, point: str, way: str, hit: int, files: Mapping[str, str]) -> None:
    query = live_through(directory, point, way, hit, files)
    if query.struck is None and hit > 1:
        # It is not reached so often.
        directory = directory / "again"
        directory.mkdir()
        query = live_through(directory, point, way, 1, files)
    assert query.struck is not None, f"{point} is never reached: {POINTS[point]}"
    assert query.output == {batch: expected(batch) for batch in range(BATCHES + 1)}, query.figures
    asyncio.run(look_at(query.location))


@pytest.mark.drawn(1)
@pytest.mark.timeout(200)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("point", POINTS)
def test_a_crash_at_a_point_changes_nothing(tmp_path: Path, seed: int, point: str, way: str) -> None:
    rng = random.Random(f"{seed}-{point}-{way}")
    hit = rng.choice([1, 1, 2, 3])
    check(tmp_path, point, way, hit, rng.choice(WAITS[{"C14": 1, "C15": 2}.get(point, 0) :]))
