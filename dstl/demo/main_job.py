"""The main job from beginning to end: prepare, run under kills, compare, report."""

from __future__ import annotations

import asyncio
import os
import random
import re
import shutil
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from operator import itemgetter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from dstl.checkpoint.savepoint.creation import choose_checkpoint
from dstl.demo.aircraft import STATE_NAME, Alert, State, expected_result
from dstl.demo.flights import load_flights, write_batches
from dstl.demo.job import OPERATOR, JobConfig
from dstl.demo.supervisor import KILLS, RunFigures, supervise
from dstl.errors import Invalid
from dstl.monitoring.overview import quantile
from dstl.option_sources import resolve
from dstl.options import S3Options, SealingOptions
from dstl.runtime import closed_after, system_runtime
from dstl.spark.application.environment import check_pyspark
from dstl.spark.saved_state.reader import read_state
from dstl.store.location import open_store


def run_demo(
    wanted: JobConfig,
    *,
    batches: int,
    kill: str,
    seed: int,
    on_progress: Callable[[str, int], None] = lambda _stage, _done: None,
    on_restore: Callable[[int, int, str], None] = lambda _done, _total, _line: None,
) -> dict[str, Any]:
    """Run the demo and return its report: the object that ``dstl demo --json`` prints.

    Args:
        wanted: The job's. Its directory is where input, output and Spark's checkpoint go, in a directory of its own
            that is deleted at the end; with a master, its executors must see it too. Empty: the temporary directory.
            A location that is empty is a directory in there; one that is given is not deleted.
        batches: Micro-batches the flights are split into.
        kill: ``none``, ``worker``, ``taskmanager``, ``driver`` or ``all``.
        seed: Decides when within a batch a kill comes.
        on_progress: Called with a stage's name and how many batches are done.
        on_restore: Called while state is restored, with bytes done and to do, and both in words.

    Raises:
        Invalid: An argument, or something that must be installed first.
        DstlError: The location cannot be used.
    """
    check_prerequisites()
    if kill not in ("none", "all", *KILLS):
        raise Invalid(f"--kill {kill}: choose none, worker, taskmanager, driver or all")
    kills = KILLS if kill == "all" else () if kill == "none" else (kill,)
    if batches <= len(kills):
        raise Invalid(f"--batches {batches} is too few for {len(kills)} kills: at least {len(kills) + 1}")
    if wanted.master is not None and {"worker", "taskmanager"}.intersection(kills):
        raise Invalid(f"--kill {kill} kills processes of this machine, and with --master they are on others")
    if wanted.work and not Path(wanted.work).is_dir():
        raise Invalid(f"--work {wanted.work} is not a directory here: make it, on every host")
    started = time.monotonic()
    place = Path(tempfile.mkdtemp(prefix="dstl-demo-", dir=wanted.work or None))
    try:
        on_progress("reading the flights", 0)
        flights = load_flights()
        write_batches(flights, place / "input", batches)
        config = replace(wanted, work=str(place), location=wanted.location or str(place / "state"))
        on_progress("running", 0)
        figures = supervise(
            config, kills, batches, random.Random(seed), lambda batch: on_progress("running", batch + 1), on_restore
        )
        on_progress("comparing", batches)
        report = {"events": flights.num_rows, **judge(config, flights), **_report(figures, config)}
        missed = set(kills).difference(report["kills"])
        differences = report["state_differences"] + report["output_differences"]
        wall_s = round(time.monotonic() - started, 2)
        return {"ok": not missed and differences == 0, **report, "seed": seed, "wall_s": wall_s}
    finally:
        shutil.rmtree(place, ignore_errors=True)


def check_prerequisites() -> None:
    """Refuse to run without Java or with another PySpark.

    Raises:
        Invalid: A PySpark below 4.1.2, or no Java of at least 17.
    """
    check_pyspark()
    try:
        said = subprocess.run(["java", "-version"], capture_output=True, text=True, check=False, timeout=60).stderr
    except OSError:
        raise Invalid("Java is missing: install a JDK 17, or put its bin directory on PATH") from None
    found = re.search(r'version "(\d+)', said)
    if found is None or int(found[1]) < 17:
        raise Invalid(f"Java 17 is needed, and this is: {said.splitlines()[0] if said else 'unknown'}")


def judge(config: JobConfig, flights: pa.Table) -> dict[str, int]:
    """Compare the last checkpoint's state and the sink's rows with :func:`expected_result`.

    Returns:
        ``keys`` and ``rows``: the aircraft (the null key included) and output rows compared. ``batches``: those that
        the last checkpoint has behind it; a driver may be killed before it tells of its last. ``state_differences``:
        keys that are missing, superfluous or have another state. ``output_differences``: rows that are missing,
        superfluous or written more than once.
    """
    expected_states, expected_alerts = expected_result(flights)
    batches, states = asyncio.run(_states(config))
    alerts = _alerts(Path(config.work))
    differing = sum(1 for key in states.keys() | expected_states.keys() if states.get(key) != expected_states.get(key))
    surplus, lacking = alerts - expected_alerts, expected_alerts - alerts
    return {
        "keys": len(expected_states),
        "rows": sum(expected_alerts.values()),
        "batches": batches,
        "state_differences": differing,
        "output_differences": surplus.total() + lacking.total(),
    }


async def _states(config: JobConfig) -> tuple[int, dict[str | None, State]]:
    runtime = system_runtime()
    sealing = resolve("sealing", SealingOptions, None, os.environ, {})  # as the job itself, whose environment this is
    store = open_store(config.location, S3Options(endpoint_url=config.endpoint_url), sealing)
    async with closed_after(store):
        checkpoint = await choose_checkpoint(store, runtime)
        rows = read_state(store, runtime, checkpoint, OPERATOR, STATE_NAME)
        return checkpoint.batch_id + 1, {row.key[0]: row.value async for row in rows}


def _alerts(work: Path) -> Counter[Alert]:
    table = pq.read_table(work / "alerts.parquet", columns=["tail", "number", "kind", "detail"])
    return Counter(zip(*(column.to_pylist() for column in table.columns), strict=True))


def _report(figures: RunFigures, config: JobConfig) -> dict[str, Any]:
    checkpoints = figures.checkpoints
    longest = max(figures.recoveries_s, key=itemgetter("all"), default=None)
    return {
        "checkpoints": len(checkpoints),
        "restarts": figures.restarts,
        "kills": [what for what, _ in figures.kills],
        "recovery_s": longest and round(longest["all"], 3),
        "recovery_parts_s": longest and {part: round(took, 3) for part, took in longest.items() if part != "all"},
        "restore_s": round(max((r["seconds"] for r in figures.restores if r["checkpoint_id"]), default=0.0), 3),
        "requests_per_checkpoint": round(sum(c["requests"] for c in checkpoints) / max(1, len(checkpoints)), 2),
        "checkpoint_bytes": sum(c["new_bytes"] for c in checkpoints),
        "checkpoint_ms": {
            name: round(1000 * (quantile([c["seconds"] for c in checkpoints], share) or 0.0), 2)
            for name, share in (("p50", 0.50), ("p99", 0.99))
        },
        "partitions": config.partitions,
        "store": config.location,
    }
