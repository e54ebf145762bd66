"""Branches of the deciding modules that no seed has taken: what the simulation proves nothing about."""

from __future__ import annotations

import dis
import json
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import dstl
from dstl.errors import Invalid
from tests.simulation.runner import run_seed

DECIDING = (
    "changelog/ledger.py",
    "changelog/storage.py",
    "checkpoint/assembly.py",
    "checkpoint/finished_attempts.py",
    "checkpoint/checkpoint_execution.py",
    "checkpoint/checkpoint_queue.py",
    "checkpoint/coordinator.py",
    "checkpoint/fleet/fleet.py",
    "checkpoint/manifest/log.py",
    "checkpoint/manifest/reader.py",
    "checkpoint/retained_objects.py",
    "checkpoint/run_opening.py",
    "checkpoint/service.py",
    "checkpoint/upkeep/cleaner.py",
    "checkpoint/upkeep/cleaning_plan.py",
    "spark/restart.py",
    "store/retry_policy.py",
    "taskmanager/state_backend.py",
)
"""The modules that decide what is durable, what counts and what is deleted, below the package ``dstl``."""


def untaken_branches(seeds: Iterable[int]) -> Mapping[str, tuple[int, list[tuple[int, int]]]]:
    """Run seeds, in this process, and return by module how many branches it has and which were not taken.

    A branch is a line and the line that it goes to; a negative one is the end of the function that begins there. It
    takes three times as long as without.

    Raises:
        Invalid: ``coverage`` is not installed.
    """
    try:
        import coverage
    except ImportError:
        raise Invalid("pip install 'dstl-pyspark[test]': branches are counted by coverage") from None
    root = Path(str(dstl.__file__)).parent
    paths = [str(root / each) for each in DECIDING]
    with _steps_recorded(paths) as steps:
        for seed in seeds:
            run_seed(seed)
    measured = coverage.Coverage(data_file=None, branch=True, include=paths)
    measured.get_data().add_arcs(steps)
    with tempfile.TemporaryDirectory() as directory:
        report = Path(directory) / "report.json"
        measured.json_report(paths, outfile=str(report))
        files = json.loads(report.read_text())["files"]
    found: dict[str, tuple[int, list[tuple[int, int]]]] = {}
    for name, file in files.items():
        at = str(Path(name).resolve().relative_to(root.resolve()))
        found[at] = file["summary"]["num_branches"], [(line, to) for line, to in file["missing_branches"]]
    return found


@contextmanager
def _steps_recorded(paths: Iterable[str]) -> Iterator[Mapping[str, set[tuple[int, int]]]]:
    """Record the steps from line to line, by file, of what is run in this thread and in those that it starts.

    Coverage's own tracer keeps one stack of frames. With Python 3.11 it loses the lines behind an ``await`` in which an
    asynchronous generator has ended, for the stack is out of step then. Here each frame knows its own line.
    """
    steps: dict[str, set[tuple[int, int]]] = {path: set() for path in paths}

    def trace(frame: FrameType, event: str, arg: object) -> Callable[..., Any] | None:
        found = steps.get(frame.f_code.co_filename)
        if found is None:
            return None
        code, first = frame.f_code, -frame.f_code.co_firstlineno
        # A frame that goes on behind an await or a yield begins where it stood.
        line = first if code.co_code[frame.f_lasti + 1] == 0 else frame.f_lineno

        def step(frame: FrameType, event: str, arg: object) -> Callable[..., Any]:
            nonlocal line
            if event == "line":
                found.add((line, frame.f_lineno))
                line = frame.f_lineno
            elif event == "return" and dis.opname[code.co_code[frame.f_lasti]].startswith("RETURN"):
                found.add((line, first))
            return step

        return step

    before = sys.gettrace()
    sys.settrace(trace)
    threading.settrace(trace)
    try:
        yield steps
    finally:
        threading.settrace(before)
        sys.settrace(before)
