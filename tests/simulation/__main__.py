"""``python -m tests.simulation --seeds N [--start S] [--journal FILE] [--json]``: the deterministic simulation.

Each seed is one world. What a seed means follows from the code of the product and of the simulator, so a seed that has
failed is worth keeping (``tests/simulation/failed_seeds.toml``) together with a test of what it has found.

The long form is resumable: ``--seeds 300000 --start drawn --journal FILE`` goes on where the journal ends, as often as
it is called, and reports all its seeds.

``--enumerate 1`` draws nothing: it runs one scenario with one fault, once for each request, connection, message and
step. It is resumable as well: ``--journal FILE``.

``detect`` builds known bugs in, and counts the seeds until one shows each (``detect --help``).

``--reach`` prints, instead of figures, which functions no seed has entered that ``unreached.toml`` does not name, with
the reason why; ``--branches`` which branches no seed has taken.

Exit codes: 0, every invariant held and every fault has struck; 1, a violation; 2, bad usage; 3, a fault never struck,
so the run proves nothing about it (only where there were enough seeds to expect all of them), or a function was not
entered that nothing names.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
from collections.abc import Sequence
from datetime import date
from pathlib import Path

from dstl.errors import Invalid
from tests.simulation import SeedResult, Summary, detection, run_seed, run_seeds
from tests.simulation.branches import (
    PACKAGES,
    entered_at_import,
    entered_functions,
    functions,
    reasons,
    untaken_branches,
)
from tests.simulation.enumeration import WAYS, strike_everywhere
from tests.simulation.journal import Journal, PlacesJournal
from tests.simulation.seeds import run_worlds

_ALL_FAULTS_FROM = 200
_TRACE_LINES = 60
_DRAWN, _OF_TODAY = "drawn", "today"
_OF_A_DAY = 1_000_000


def main(arguments: Sequence[str] | None = None) -> int:
    """Run seeds and print what they showed; return the exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments[:1] == ["detect"]:
        return detection.main(arguments[1:])
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seeds", type=int, default=100, metavar="N", help="how many seeds (default 100)")
    parser.add_argument(
        "--start",
        default="0",
        metavar="S",
        help=f"the first seed (default 0); {_DRAWN}: by chance, and printed; {_OF_TODAY}: of the day's own million, so "
        "that no two nights have a seed in common",
    )
    cpus = os.cpu_count() or 1
    parser.add_argument(
        "--jobs", type=int, default=cpus, metavar="N", help="processes that share the seeds (default CPUs)"
    )
    parser.add_argument(
        "--journal", type=Path, metavar="FILE", help="write results there, and go on where the file ends if it is there"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object on the last line of standard output")
    parser.add_argument("--trace", action="store_true", help="print the whole trace of a seed that fails")
    parser.add_argument(
        "--enumerate",
        type=int,
        metavar="K",
        help="instead of seeds: one scenario with one fault at every K-th request, connection, message and step (1: at "
        "each)",
    )
    parser.add_argument("--branches", action="store_true", help="print the branches that no seed has taken")
    parser.add_argument(
        "--reach", action="store_true", help="print the functions that no seed has entered, and no reason names"
    )
    options = parser.parse_args(arguments)
    if options.seeds < 1 or options.jobs < 1:
        parser.error("--seeds and --jobs must be at least 1")
    if options.enumerate is not None:
        if options.journal and options.enumerate > 1:
            parser.error("--journal goes with --enumerate 1: it keeps what each place has shown")
        try:
            return _enumerate(max(1, options.enumerate), options.journal)
        except Invalid as error:
            parser.error(str(error))
    if options.start not in (_DRAWN, _OF_TODAY) and not options.start.isdecimal():
        parser.error(f"--start is a number, {_DRAWN} or {_OF_TODAY}")
    if options.start == _DRAWN:
        start = random.SystemRandom().randrange(1 << 32)
    else:
        start = date.today().toordinal() * _OF_A_DAY if options.start == _OF_TODAY else int(options.start)
    if options.branches or options.reach:
        return (_branches if options.branches else _reach)(range(start, start + options.seeds))
    try:
        journal = Journal(options.journal, start, options.seeds) if options.journal else None
    except Invalid as error:
        parser.error(str(error))
    seeds = journal.left if journal else range(start, start + options.seeds)
    first = journal.start if journal else start
    print(f"seeds from {first}, of which {seeds.start - first} are done", file=sys.stderr)

    def progress(result: SeedResult) -> None:
        if journal:
            journal.add(result)
        if result.violations:
            _explain(result, whole=options.trace)
        elif (result.seed - first + 1) % 100 == 0:
            print(f"{result.seed - first + 1} of {seeds.stop - first} seeds", file=sys.stderr)

    summary = run_seeds(seeds, jobs=min(options.jobs, len(seeds) or 1), on_result=progress)
    if journal:
        journal.flush(summary.real_seconds)
        summary = journal.summary
    print(json.dumps({"start": first, **_figures(summary)}) if options.json else _table(summary))
    if summary.failed:
        return 1
    return 3 if summary.missing and summary.seeds >= _ALL_FAULTS_FROM else 0


def _enumerate(every: int, path: Path | None) -> int:
    """Strike everywhere in the scenario, and print how many places there were; return the exit code."""
    journal = PlacesJournal(path) if path else None
    failed = 0
    for each in journal.violations if journal else ():
        failed += 1
        print(each, file=sys.stderr)
    for where, what in WAYS:
        struck = journal.places(where, what) if journal else 0
        if journal is None or not journal.has_all(where, what):
            for nth, result in strike_everywhere(where, what, every=every, first=struck + 1):
                struck += 1
                if journal:
                    journal.add(where, what, nth, map(str, result.violations))
                for violation in result.violations:
                    failed += 1
                    print(f"{what} at {where} {nth}: {violation}", file=sys.stderr)
            if journal:
                journal.end(where, what)
        print(f"{what!s:24}{where:20}{struck} places", flush=True)
    return int(failed > 0)


def _branches(seeds: range) -> int:
    """Print what is left untaken, module by module; return the exit code."""
    print(f"seeds {seeds.start} to {seeds.stop - 1}", flush=True)
    for name, (count, untaken) in untaken_branches(seeds).items():
        print(f"{name:44}{count - len(untaken):4} of {count}")
        for line, to in untaken:
            print(f"    {line} -> {to if to > 0 else 'end'}")
    return 0


def _reach(seeds: range) -> int:
    """Print what was not entered, package by package; return the exit code."""
    print(f"seeds {seeds.start} to {seeds.stop - 1}", flush=True)
    entered, named = entered_functions(lambda: [run_worlds(seed) for seed in seeds]) | entered_at_import(), reasons()
    every = sorted(set(functions().values()))
    missed = [each for each in every if each not in entered]
    unnamed = [each for each in missed if each not in named]
    for package in (*PACKAGES, ""):
        count, left, new = (
            sum(each.module.startswith(package) for each in those) for those in (every, missed, unnamed)
        )
        print(f"{package or 'all':24}{left:4} of {count} not entered, {new} of them without a reason")
    for function in unnamed:
        print(f"    {function}")
    for function in sorted(entered & named.keys()):
        print(f"    {function} is named, and entered all the same")
    return 3 if unnamed else 0


def _explain(result: SeedResult, *, whole: bool) -> None:
    """Say what a seed has violated, and how to see it again."""
    for violation in result.violations:
        print(f"seed {result.seed}: {violation}", file=sys.stderr)
    again = run_seed(result.seed, keep_trace=True)
    same = "the same trace" if again.trace_hash == result.trace_hash else "ANOTHER TRACE: the seed is not deterministic"
    for line in again.trace if whole else again.trace[-_TRACE_LINES:]:
        print(f"    {line}", file=sys.stderr)
    print(
        f"replay with: python -m tests.simulation --seeds 1 --start {result.seed} --trace "
        f"(replayed now with {same}, {result.trace_hash})",
        file=sys.stderr,
    )


def _figures(summary: Summary) -> dict[str, object]:
    return {
        "seeds": summary.seeds,
        "violations": [
            {"seed": result.seed, "invariant": each.invariant, "at": round(each.at, 3), "what": each.what}
            for result in summary.failed
            for each in result.violations
        ],
        "faults": {str(kind): summary.faults[kind] for kind in sorted(summary.faults)},
        "missing_faults": [str(kind) for kind in summary.missing],
        "batches": summary.batches,
        "replays": summary.replays,
        "checkpoints": summary.checkpoints,
        "savepoints": summary.savepoints,
        "given_up": summary.given_up,
        "materialized": summary.materialized,
        "restores": summary.restores,
        "verified": summary.verified,
        "cleanings": summary.cleanings,
        "virtual_hours": round(summary.virtual_seconds / 3600, 2),
        "real_seconds": round(summary.real_seconds, 2),
    }


def _table(summary: Summary) -> str:
    figures = _figures(summary)
    violations, faults, missing = (figures.pop(name) for name in ("violations", "faults", "missing_faults"))
    lines = [f"{name.replace('_', ' '):16}{value}" for name, value in figures.items()]
    lines.append(f"{'violations':16}{len(violations) if isinstance(violations, list) else 0}")
    lines += [f"  {name:34}{number}" for name, number in (faults.items() if isinstance(faults, dict) else ())]
    if missing:
        lines.append(f"never happened: {missing}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
