"""Running many seeds: each is a world of a query, and some a world of a query on ``dstl://`` besides."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field, fields, replace
from functools import partial
from itertools import chain, islice
from multiprocessing import get_context

from tests.simulation.audit import Violation
from tests.simulation.faults import FaultKind
from tests.simulation.file_query import run_file_seed
from tests.simulation.runner import SeedResult, quiet, run_seed

_COLLECT_EVERY = 20
_FILES_EVERY = 4
"""One seed in so many has a world of files: it is a third of the code, and costs as much as the other."""


@dataclass
class Summary:
    """The figures of many seeds, as in :class:`SeedResult`, summed."""

    seeds: int = 0
    failed: list[SeedResult] = field(default_factory=list)
    faults: Counter[FaultKind] = field(default_factory=Counter)
    batches: int = 0
    checkpoints: int = 0
    restores: int = 0
    verified: int = 0
    materialized: int = 0
    cleanings: int = 0
    given_up: int = 0
    replays: int = 0
    savepoints: int = 0
    virtual_seconds: float = 0.0
    real_seconds: float = 0.0

    def add(self, result: SeedResult) -> None:
        """Take a seed's figures in."""
        self.seeds += 1
        self.faults.update(result.faults)
        self.batches += result.batches
        self.checkpoints += result.checkpoints
        self.restores += result.restores
        self.verified += result.verified
        self.materialized += result.materialized
        self.cleanings += result.cleanings
        self.given_up += result.given_up
        self.replays += result.replays
        self.savepoints += result.savepoints
        self.virtual_seconds += result.virtual_seconds
        if result.violations:
            self.failed.append(result)

    def join(self, other: Summary) -> None:
        """Take in what other seeds have shown."""
        for each in fields(self):
            # Numbers add up, lists become one, and so do counters.
            setattr(self, each.name, getattr(self, each.name) + getattr(other, each.name))

    @property
    def missing(self) -> list[FaultKind]:
        """Faults that have never happened: then the run proves nothing about them (I18)."""
        return [kind for kind in FaultKind if not self.faults[kind]]


def run_seeds(
    seeds: Iterable[int],
    *,
    jobs: int = 0,
    on_result: Callable[[SeedResult], None] | None = None,
) -> Summary:
    """Run many seeds.

    Args:
        seeds: In any order; each stands for itself.
        jobs: Processes that share them; 0: this one runs them.
        on_result: Called with each result, in the order of the seeds.
    """
    summary, began = Summary(), time.monotonic()
    chunks = _chunks(seeds)
    with ExitStack() as pools:
        run: Iterable[list[SeedResult]] = map(_run_chunk, chunks)
        if jobs:
            # A server forks them: a fork of the caller would take its threads and loops along. Each runs one chunk, and
            # its worlds end with it: to collect them is a tenth of the whole.
            context = get_context("forkserver")
            context.set_forkserver_preload([__name__])
            pool = ProcessPoolExecutor(jobs, context, max_tasks_per_child=1)
            run = pools.enter_context(pool).map(partial(_run_chunk, collect=False), chunks)
        for result in chain.from_iterable(run):
            summary.add(result)
            summary.real_seconds = time.monotonic() - began
            if on_result is not None:
                on_result(result)
    return summary


def _chunks(seeds: Iterable[int]) -> Iterator[list[int]]:
    left = iter(seeds)
    while chunk := list(islice(left, _COLLECT_EVERY)):
        yield chunk


def _run_chunk(seeds: list[int], *, collect: bool = True) -> list[SeedResult]:
    """Run some seeds and collect their garbage together."""
    with quiet(collect=collect):
        return [run_worlds(seed) for seed in seeds]


def run_worlds(seed: int) -> SeedResult:
    """Run the worlds of one seed; the collector is not run behind them."""
    result = run_seed(seed, collect=False)
    if seed % _FILES_EVERY:
        return result
    files = run_file_seed(seed, collect=False)
    violations = (Violation("files", 0.0, each) for each in files.violations)
    return replace(result, violations=(*result.violations, *violations), faults=result.faults + files.faults)
