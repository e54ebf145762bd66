"""``python -m tests.simulation detect``: in how many seeds the simulation finds each known bug.

Each bug is built in by itself. First the test that it names is run, then seeds from 0 on, as every night's are, with
the faults that they draw, until one shows it. All bugs have their turn with 3 seeds, then with 12, and so on, first
those that nothing has shown: a run that is stopped has a table as well.

``--journal FILE`` makes it resumable. Without ``--json`` the page of the documentation is printed.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import os
import resource
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median

import pytest

from dstl.errors import Invalid
from tests.simulation import run_seed
from tests.simulation.file_query import run_file_seed
from tests.simulation.journal import JournalFile
from tests.simulation.mutants import ROOT, Mutant, known_bugs

_FIRST, _MORE = 3, 4
_COLLECT_EVERY = 20
_HANGS_S = 60
"""Processor seconds. A seed takes less than one, and a few the slowest: one that takes this long would be looked at."""
_INTRODUCTION = """# In how many seeds a known bug is found

Each bug was built into the product by itself (`tests/simulation/bugs.toml`). The test that it names was run, and seeds
0, 1, 2, ... with the faults that they draw, as in a night, until one broke an invariant. "More than" a number: no seed
of so many did, and the run was stopped there, for the named test fails. Made by
`python -m tests.simulation detect --journal FILE`. I22 to I24 are seen in runs without a fault behind those with
faults: something failed, a record too many was written, the log was not cut.
"""


@dataclass
class Detection:
    """What was seen of one bug.

    Attributes:
        bug: Its name.
        seeds: Seeds that were run, the one that has shown it included.
        found: Whether one has.
        how: The violation's invariant and text.
        seconds: Processor time of the seeds.
        test_fails: Whether the test that is said to find it does; None: not run.
    """

    bug: str
    seeds: int = 0
    found: bool = False
    how: str = ""
    seconds: float = 0.0
    test_fails: bool | None = None

    @property
    def is_missed(self) -> bool:
        """True where neither a seed nor a test has found it."""
        return not self.found and not self.test_fails


def main(arguments: Sequence[str]) -> int:
    """Find every bug, and print the table; return 1 where neither a seed nor a test has found one."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation detect", description=__doc__)
    parser.add_argument("--most", type=int, default=1000, metavar="N", help="seeds for a bug; 0: print the journal")
    parser.add_argument("--seconds", type=float, default=600.0, metavar="S", help="and seconds (default 600)")
    parser.add_argument("--bug", action="append", metavar="NAME", help="these alone")
    parser.add_argument("--journal", type=Path, metavar="FILE", help="go on where it ends, and add to it")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of the page")
    options = parser.parse_args(arguments)
    sys.path.append(str(ROOT / "tests"))
    mutants = {each.name: each for each in known_bugs()}
    if unknown := set(options.bug or ()) - mutants.keys():
        parser.error(f"no such bugs: {', '.join(sorted(unknown))}")
    mutants = {name: each for name, each in mutants.items() if not options.bug or name in options.bug}
    try:
        journal = JournalFile(options.journal) if options.journal else None
    except Invalid as error:
        parser.error(str(error))
    table = {name: Detection(name) for name in mutants}
    for line in journal.lines if journal else ():
        table[line["bug"]] = Detection(**line)
    for each in _look(mutants, table, options.most, options.seconds):
        print(f"{each.bug}: {each.seeds} seeds, {each.how or each.test_fails}", file=sys.stderr, flush=True)
        if journal:
            journal.append(asdict(each))
    shown = [table[name] for name in mutants]
    print(
        json.dumps({**_summary(shown), "bugs": [asdict(each) for each in shown]})
        if options.json
        else _page(shown, mutants)
    )
    return int(any(each.is_missed for each in shown))


def _look(mutants: dict[str, Mutant], table: dict[str, Detection], most: int, seconds: float) -> Iterator[Detection]:
    """Run tests, then seeds, and yield each bug of which more is known."""
    for name, mutant in mutants.items():
        seen = table[name]
        if most and seen.test_fails is None and mutant.kept_by:
            seen.test_fails = _test_fails(mutant)
            yield seen
    limit = _FIRST
    while limit < most * _MORE:
        for name in sorted(mutants, key=lambda name: not table[name].is_missed):
            seen = table[name]
            if not seen.found and seen.seeds < min(limit, most) and seen.seconds < seconds:
                _run_seeds(mutants[name], seen, min(limit, most), seconds)
                yield seen
        limit *= _MORE


def _run_seeds(mutant: Mutant, seen: Detection, limit: int, seconds: float) -> None:
    """Run seeds with a bug in a process of its own: some hang, and some would stay behind in this one."""
    here, there = multiprocessing.get_context("fork").Pipe()
    process = multiprocessing.get_context("fork").Process(target=_seeds, args=(mutant, range(seen.seeds, limit), there))
    process.start()
    there.close()
    with suppress(EOFError):
        while seen.seeds < limit and seen.seconds < seconds and not seen.found:
            how, took = here.recv()
            seen.seeds, seen.found, seen.how, seen.seconds = seen.seeds + 1, bool(how), how, seen.seconds + took
    process.kill()
    process.join()
    if process.exitcode == 1:
        raise RuntimeError(f"{mutant.name} could not be built in, see above")
    if seen.seeds < limit and not seen.found and seen.seconds < seconds:
        seen.seeds, seen.found, seen.how = seen.seeds + 1, True, f"the process ends with {process.exitcode}"


def _seeds(mutant: Mutant, seeds: range, results: Connection) -> None:
    with pytest.MonkeyPatch.context() as patch:
        mutant.build_in(patch)
        gc.collect()
        gc.freeze()  # what is imported by now is no world's garbage
        for seed in seeds:
            if seed % _COLLECT_EVERY == 0:
                gc.collect()
            began = time.process_time()
            resource.setrlimit(resource.RLIMIT_CPU, (int(began) + _HANGS_S, resource.RLIM_INFINITY))
            try:
                run = run_file_seed if mutant.world == "files" else run_seed
                found = run(seed, collect=False).violations
                how = str(found[0]) if found else ""
            except Exception as error:
                how = f"the world ends with {error!r}"
            results.send((how, time.process_time() - began))
            if how:
                return


def _test_fails(mutant: Mutant) -> bool:
    """Run the test that is said to find a bug, with the bug built in."""
    process = multiprocessing.get_context("fork").Process(target=_test, args=(mutant,))
    process.start()
    process.join()
    return process.exitcode not in (0, 4, 5)  # 4 and 5: pytest has found no such test


def _test(mutant: Mutant) -> None:
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)
    resource.setrlimit(resource.RLIMIT_CPU, (10 * _HANGS_S, resource.RLIM_INFINITY))
    with pytest.MonkeyPatch.context() as patch:
        mutant.build_in(patch)
        if mutant.fails_with:
            mutant.run_test(1)
            os._exit(0)
        test = str(ROOT / "tests" / mutant.kept_by)
        os._exit(int(pytest.main(["-x", "-q", "-n0", "-p", "no:cacheprovider", "-m", "", test])))


def _summary(table: Sequence[Detection]) -> dict[str, object]:
    found = sorted(each.seeds for each in table if each.found)
    return {
        "known_bugs": len(table),
        "found_by_seeds": len(found),
        "median_seeds": median([each.seeds if each.found else float("inf") for each in table]) if table else 0,
        "median_seeds_of_those": median(found) if found else 0,
        "most_seeds_of_those": max(found, default=0),
        "found_by_their_tests": sum(bool(each.test_fails) for each in table),
        "found_by_their_tests_alone": [each.bug for each in table if not each.found and each.test_fails],
        "not_found": [each.bug for each in table if each.is_missed],
    }


def _page(table: Sequence[Detection], mutants: dict[str, Mutant]) -> str:
    summary = _summary(table)
    lines = [_INTRODUCTION]
    missed = len([each for each in table if each.is_missed])
    lines += [
        f"{summary['known_bugs']} bugs: {summary['found_by_their_tests']} are found by their tests, "
        f"{summary['found_by_seeds']} by seeds, after {summary['median_seeds_of_those']} in the median and "
        f"{summary['most_seeds_of_those']} at most, and {missed} by nothing.\n",
        "| bug | what it does | seeds | seen by |",
        "|---|---|---|---|",
    ]
    for each in sorted(table, key=lambda each: (not each.found, each.seeds, each.bug)):
        mutant = mutants[each.bug]
        seeds = str(each.seeds) if each.found else f"more than {each.seeds}"
        how = each.how.partition(" ")[0]
        test = f"`{mutant.kept_by.partition('::')[2]}`" if each.test_fails else ""
        world = " (a query on `dstl://`)" if mutant.world == "files" else ""
        how = "the directory" if how == "files" or how == "seed" else "a hang or an end" if how in ("a", "the") else how
        how = ", ".join(filter(None, (how, test))) or "nothing"
        lines.append(f"| `{each.bug}` | {mutant.what.replace('|', ' ')}{world} | {seeds} | {how} |")
    return "\n".join(lines)
