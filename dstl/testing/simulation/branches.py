"""Branches of the deciding modules that no seed has taken: what the simulation proves nothing about."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path

import dstl
from dstl.errors import Invalid
from dstl.testing.simulation.runner import run_seed

__all__ = ["DECIDING", "untaken_branches"]

DECIDING = (
    "changelog/ledger.py",
    "changelog/batcher.py",
    "checkpoint/acknowledgements.py",
    "checkpoint/attempt_register.py",
    "checkpoint/checkpoint_execution.py",
    "checkpoint/checkpoint_turns.py",
    "checkpoint/coordinator.py",
    "checkpoint/fleet/fleet.py",
    "checkpoint/manifest/log.py",
    "checkpoint/manifest/scan.py",
    "checkpoint/put_once.py",
    "checkpoint/retained_objects.py",
    "checkpoint/run_opening.py",
    "checkpoint/service.py",
    "checkpoint/truncation.py",
    "checkpoint/upkeep/cleaner.py",
    "checkpoint/upkeep/cleaning_plan.py",
    "spark/restart.py",
    "taskmanager/state_backend.py",
)
"""The modules that decide what is durable, what counts and what is deleted, below the package ``dstl``."""


def untaken_branches(seeds: Iterable[int]) -> Mapping[str, tuple[int, list[tuple[int, int]]]]:
    """Run seeds, in this process, and return by module how many branches it has and which were not taken.

    A branch is a line and the line that it goes to; a negative one is the end of the function that begins there. It
    takes two to three times as long as without.

    Raises:
        Invalid: ``coverage`` is not installed.
    """
    try:
        import coverage
    except ImportError:
        raise Invalid("pip install 'dstl-pyspark[test]': branches are counted by coverage") from None
    root = Path(str(dstl.__file__)).parent
    measured = coverage.Coverage(data_file=None, branch=True, include=[str(root / each) for each in DECIDING])
    measured.start()
    try:
        for seed in seeds:
            run_seed(seed)
    finally:
        measured.stop()
    with tempfile.TemporaryDirectory() as directory:
        report = Path(directory) / "report.json"
        measured.json_report([str(root / each) for each in DECIDING], outfile=str(report))
        files = json.loads(report.read_text())["files"]
    found: dict[str, tuple[int, list[tuple[int, int]]]] = {}
    for name, file in files.items():
        at = str(Path(name).resolve().relative_to(root.resolve()))
        found[at] = file["summary"]["num_branches"], [(line, to) for line, to in file["missing_branches"]]
    return found
