"""The main job from beginning to end: prepare, run under kills, compare, report."""

from __future__ import annotations

import random
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from dstl.demo.flights import load_flights, write_batches
from dstl.demo.job import JobConfig
from dstl.demo.supervisor import KILLS, RunFigures, supervise
from dstl.demo.verdict import Verdict, judge
from dstl.errors import Invalid
from dstl.spark.application.environment import check_pyspark

__all__ = ["check_prerequisites", "run_demo"]


def run_demo(
    *,
    store: str | None,
    endpoint_url: str | None,
    partitions: int,
    batches: int,
    kill: str,
    seed: int,
    task_managers: int = 1,
    master: str | None = None,
    work: str | None = None,
    on_progress: Callable[[str, int], None] = lambda _stage, _done: None,
    on_restore: Callable[[int, int, str], None] = lambda _done, _total, _line: None,
) -> dict[str, Any]:
    """Run the demo and return its report: the object that ``dstl demo --json`` prints.

    Args:
        store: Location of the state; a directory of its own under the temporary one by default. Not deleted when given.
        endpoint_url: Of another S3 than AWS's.
        partitions: Partitions of the operator.
        batches: Micro-batches the flights are split into.
        kill: ``none``, ``worker``, ``taskmanager``, ``driver`` or ``all``.
        seed: Decides when within a batch a kill comes.
        task_managers: TaskManager processes.
        master: Spark's master; this machine by default.
        work: Where input, output and Spark's checkpoint go, in a directory of its own that is deleted at the end; with
            a master, its executors must see it too. The temporary directory by default.
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
    if master is not None and {"worker", "taskmanager"}.intersection(kills):
        raise Invalid(f"--kill {kill} kills processes of this machine, and with --master they are on others")
    if work is not None and not Path(work).is_dir():
        raise Invalid(f"--work {work} is no directory here: make it, on every host")
    started = time.monotonic()
    place = Path(tempfile.mkdtemp(prefix="dstl-demo-", dir=work))
    try:
        on_progress("reading the flights", 0)
        flights = load_flights()
        write_batches(flights, place / "input", batches)
        config = JobConfig(str(place), store or str(place / "state"), endpoint_url, partitions, task_managers, master)
        on_progress("running", 0)
        figures = supervise(
            config, kills, batches, random.Random(seed), lambda batch: on_progress("running", batch + 1), on_restore
        )
        on_progress("comparing", batches)
        verdict = judge(config, flights)
        return _report(flights.num_rows, figures, verdict, config, kills, seed, time.monotonic() - started)
    finally:
        shutil.rmtree(place, ignore_errors=True)


def check_prerequisites() -> None:
    """Refuse to run without Java or with another PySpark.

    Raises:
        Invalid: A PySpark below 4.1, or no Java of at least 17.
    """
    check_pyspark()
    try:
        said = subprocess.run(["java", "-version"], capture_output=True, text=True, check=False, timeout=60).stderr
    except OSError:
        raise Invalid("there is no Java: install a JDK 17, or put its bin directory on PATH") from None
    found = re.search(r'version "(\d+)', said)
    if found is None or int(found[1]) < 17:
        raise Invalid(f"Java 17 is needed, and this is: {said.splitlines()[0] if said else 'unknown'}")


def _report(
    events: int,
    figures: RunFigures,
    verdict: Verdict,
    config: JobConfig,
    kills: Sequence[str],
    seed: int,
    wall_s: float,
) -> dict[str, Any]:
    checkpoints = figures.checkpoints
    missed = [what for what in kills if what not in {done for done, _ in figures.kills}]
    sound = verdict.state_differences == 0 and verdict.output_differences == 0
    return {
        "ok": sound and not missed,
        "events": events,
        "keys": verdict.keys,
        "rows": verdict.rows,
        # Not of the checkpoints that were told: a driver may be killed before it tells of its last.
        "batches": verdict.batches,
        "checkpoints": len(checkpoints),
        "restarts": figures.restarts,
        "kills": [what for what, _ in figures.kills],
        "recovery_s": round(max(figures.recoveries_s, default=0.0), 3),
        "restore_s": round(max((r["seconds"] for r in figures.restores if r["checkpoint_id"]), default=0.0), 3),
        "state_differences": verdict.state_differences,
        "output_differences": verdict.output_differences,
        "requests_per_checkpoint": round(sum(c["requests"] for c in checkpoints) / max(1, len(checkpoints)), 2),
        "checkpoint_bytes": sum(c["new_bytes"] for c in checkpoints),
        "checkpoint_ms": {
            "p50": _percentile_ms(checkpoints, 0.50),
            "p99": _percentile_ms(checkpoints, 0.99),
        },
        "partitions": config.partitions,
        "store": config.location,
        "seed": seed,
        "wall_s": round(wall_s, 2),
    }


def _percentile_ms(checkpoints: Sequence[dict[str, Any]], share: float) -> float:
    ordered = sorted(c["seconds"] for c in checkpoints)
    return round(1000 * ordered[min(len(ordered) - 1, int(share * len(ordered)))], 2) if ordered else 0.0
