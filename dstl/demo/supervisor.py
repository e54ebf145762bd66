"""The demo's parent process: starts the driver, kills what it is asked to kill, and keeps the figures."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dstl.demo.job import JobConfig
from dstl.errors import Unavailable, error_from_wire

KILLS = ("worker", "taskmanager", "driver")
"""What can be killed, in the order in which ``all`` does it."""

_MOST_STARTS = len(KILLS) + 2
"""The first, one for each kind of kill, and one for a start that the machine itself has spoilt."""
_MOST_SECONDS = 1800.0
"""Many times a run's length on a slow machine: a driver that hangs ends the demo, and not whatever runs it."""


@dataclass
class RunFigures:
    """The figures of one run of the demo.

    Attributes:
        checkpoints: Every completed checkpoint's figures, as the driver told them.
        restores: Every restore's.
        restarts: Restarts of the query inside a driver, and starts of a new driver after the first.
        kills: ``(what, pid)`` of every process that was killed.
        recoveries_s: For each kill that a checkpoint followed, seconds until that completed: in all, and of them until
            the query started again (``spark``), until tables were there (``restore``), and the batch.
    """

    checkpoints: list[dict[str, Any]] = field(default_factory=list)
    restores: list[dict[str, Any]] = field(default_factory=list)
    restarts: int = 0
    kills: list[tuple[str, int]] = field(default_factory=list)
    recoveries_s: list[dict[str, float]] = field(default_factory=list)


def supervise(
    config: JobConfig,
    kills: tuple[str, ...],
    batches: int,
    rng: random.Random,
    on_batch: Callable[[int], None],
    on_restore: Callable[[int, int, str], None] = lambda _done, _total, _line: None,
) -> RunFigures:
    """Run the job to its end, killing the named processes at points spread over the run.

    A kill comes a random moment after a checkpoint, so it hits some point of the following batch. Only processes that
    the driver has reported as its own are killed.

    Args:
        config: The job's.
        kills: What to kill, in order.
        batches: How many micro-batches there will be.
        rng: Decides the moments.
        on_batch: Called with each completed batch's number.
        on_restore: Called while state is restored, with bytes done and to do, and both in words.

    Raises:
        DstlError: The driver refused to run, with its own error.
        Unavailable: The driver ended too often, or took too long.
    """
    figures = RunFigures()
    due = {max(0, (n + 1) * batches // (len(kills) + 1) - 1): what for n, what in enumerate(kills)}
    deadline = time.monotonic() + _MOST_SECONDS
    log = Path(config.work) / "driver.log"
    recovery: Recovery | None = None
    for start in range(_MOST_STARTS):
        figures.restarts += 1 if start else 0
        with open(log, "ab") as stderr:
            driver = subprocess.Popen(
                [sys.executable, "-m", "dstl.demo.job", config.to_json()],
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
            )
        try:
            for event in _events(driver, deadline):
                if event["event"] == "refused":
                    raise error_from_wire(event["kind"], event["why"])
                if event["event"] == "finished":
                    driver.wait(60)
                    return figures
                if event["event"] == "restart":
                    figures.restarts += 1
                if event["event"] == "restoring":
                    on_restore(event["done"], event["total"], event["line"])
                if event["event"] == "restore":
                    figures.restores.append(event)
                if recovery is not None and recovery.ends_with(event):
                    figures.recoveries_s.append(recovery.parts())
                    recovery = None
                if event["event"] != "checkpoint":
                    continue
                figures.checkpoints.append(event)
                on_batch(event["batch_id"])
                what = due.pop(event["batch_id"], None)
                if what is not None:
                    time.sleep(rng.uniform(0.05, 0.8))
                    pid = _kill(what, driver, event)
                    if pid is not None:
                        figures.kills.append((what, pid))
                        recovery = Recovery(time.monotonic())
        finally:
            if driver.poll() is None:
                driver.kill()
            driver.wait()
    last = log.read_text(errors="replace")[-4000:]
    raise Unavailable(f"the demo's driver ended {_MOST_STARTS} times without finishing; its last messages:\n{last}")


class Recovery:
    """The time from a kill to the next checkpoint.

    What the driver told before the kill may be read after it, for a quick driver is some batches ahead of whoever
    reads. So events count by their own time, ``at``, in seconds of the machine's monotonic clock.

    Args:
        killed_at: When the process was killed, by the same clock.
    """

    def __init__(self, killed_at: float) -> None:
        self._killed_at = killed_at
        self._reached: dict[str, float] = {}

    def ends_with(self, event: Mapping[str, Any]) -> bool:
        """Take the next event in; whether the recovery has ended with it."""
        if event["at"] <= self._killed_at:
            return False
        match event["event"]:
            case "started" | "restart":
                self._reached = {"spark": event["at"]}
            case "restore":
                self._reached["restore"] = event["at"]
            case "checkpoint":
                self._reached["batch"] = event["at"]
                return True
        return False

    def parts(self) -> dict[str, float]:
        """Return seconds of the whole (``all``) and of each part, in their order: 0 for one that was not needed."""
        found, before = {}, self._killed_at
        for part in ("spark", "restore", "batch"):
            end = self._reached.get(part, before)
            found[part], before = end - before, end
        return {"all": before - self._killed_at, **found}


def _events(driver: subprocess.Popen[str], deadline: float) -> Iterator[dict[str, Any]]:
    assert driver.stdout is not None
    for line in driver.stdout:
        if time.monotonic() > deadline:
            raise Unavailable(f"the demo took more than {_MOST_SECONDS:.0f} s: try fewer batches")
        try:
            event = json.loads(line)
        except ValueError:
            continue
        if isinstance(event, dict) and "event" in event:
            yield event


def _kill(what: str, driver: subprocess.Popen[str], event: dict[str, Any]) -> int | None:
    """Kill one process with SIGKILL and return its id; None where none of that kind is left."""
    candidates = {"driver": [driver.pid], "taskmanager": event["taskmanagers"], "worker": event["workers"]}[what]
    for pid in reversed(candidates):
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
        return int(pid)
    return None
