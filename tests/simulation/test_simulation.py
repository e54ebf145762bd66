"""The short form of the simulation; the long one is ``python -m tests.simulation --seeds 1000``."""

import inspect
import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from dstl.checkpoint.manifest.log import ManifestLog
from dstl.errors import Invalid
from tests.simulation import FaultKind, FaultPlan, Summary, branches, journal, run_seed, run_seeds
from tests.simulation import __main__ as simulate
from tests.simulation.file_query import run_file_seed
from tests.simulation.journal import Journal
from tests.simulation.mutants import ROOT

FAILED = tomllib.loads((Path(__file__).parent / "failed_seeds.toml").read_text())["seed"]
SEEDS = int(os.environ.get("DSTL_SIMULATION_SEEDS", "10"))


def check(found: Summary) -> None:
    failed = [(result.seed, str(result.violations[0])) for result in found.failed]
    assert not failed, f"python -m tests.simulation --seeds 1 --start {failed[0][0]}: {failed}"


@pytest.mark.drawn(5)
@pytest.mark.parametrize("number", [each["number"] for each in FAILED])
def test_a_seed_that_has_failed_once_holds(number: int) -> None:
    """They catch what a change breaks."""
    check(run_seeds([number]))


def test_every_fault_happens_and_breaks_no_invariant() -> None:
    # Small worlds that have nearly all of them, and more where a change has made them others.
    found, more = run_seeds((15, 2, 22, 5, 26, 21, 3670983358, 3946877371)), iter(range(30))
    while found.missing and (number := next(more, None)) is not None:
        found.join(run_seeds([number]))
    check(found)
    assert not found.missing, f"these faults never happened, so nothing is proven about them: {found.missing}"
    assert found.checkpoints > 3 * found.seeds
    assert found.restores > found.seeds
    assert found.replays > found.seeds / 4
    assert found.materialized > 0
    assert found.cleanings > 0


def test_drawn_seeds_hold_every_invariant(seed: int) -> None:
    """Drawn seeds, which are printed to be replayed, look for what nobody has seen yet."""
    check(run_seeds(range(seed, seed + SEEDS)))


def test_a_driver_that_hears_of_its_commit_when_others_have_gone_on_breaks_no_invariant() -> None:
    # It was stopped between its record and the answer, and its checkpoint is subsumed when it goes on.
    nemesis = (FaultKind.SECOND_DRIVER, FaultKind.DRIVER_PAUSE)
    plan = FaultPlan(nemesis=nemesis, nemesis_mean_s=0.3, longest_delay_s=10.0)
    assert run_seed(31, plan=plan).violations == ()


def test_what_a_failed_seed_has_found_is_kept_by_a_test_that_exists() -> None:
    tests = "".join(path.read_text() for path in Path(__file__).parents[1].rglob("test_*.py"))
    assert [each["kept_by"] for each in FAILED if f"def {each.get('kept_by', 'test_')}" not in tests] == []


def test_one_seed_is_one_trace_in_each_process_beside_any_others_and_with_any_hash_seed(seed: int) -> None:
    program = """
import json, sys
from tests.simulation import run_seeds, seeds
seeds._COLLECT_EVERY = 1  # so that either process has some
traces = []
tell = lambda each: traces.append((each.seed, each.trace_hash, each.faults))
run_seeds(map(int, sys.argv[1:]), jobs=2, on_result=tell)
print(json.dumps(traces))
"""
    # The last one has several hosts of files: they were asked in the order of a set.
    numbers = (seed, 1578801532)
    shared = subprocess.run(
        [sys.executable, "-c", program, *map(str, numbers)],
        env={**os.environ, "PYTHONHASHSEED": "1"},
        capture_output=True,
        text=True,
        check=True,
        timeout=240,
    )
    here: list[tuple[object, ...]] = []
    run_seeds(numbers, on_result=lambda each: here.append((each.seed, each.trace_hash, each.faults)))
    assert json.loads(shared.stdout) == json.loads(json.dumps(here))


def test_without_faults_each_batch_is_one_checkpoint() -> None:
    result = run_seed(10, plan=FaultPlan(), target_batches=10)  # a world with nothing behind its batches
    assert result.violations == ()
    assert result.batches == result.checkpoints
    assert result.batches >= 10
    assert result.restores == 1


@pytest.mark.parametrize("starts", [30, pytest.param(1000, marks=[pytest.mark.long, pytest.mark.timeout(0)])])
def test_however_often_a_query_was_started_a_start_costs_the_same(starts: int) -> None:
    # As where a scheduler starts it for a batch or two at a time.
    result = run_seed(9, plan=FaultPlan(saves=0.0), target_batches=1, starts=starts)
    assert result.violations == ()
    assert result.restores > starts
    assert result.batches >= starts


def test_a_long_run_goes_on_where_it_was_stopped_and_reports_all_its_figures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "journal"
    stopped = Journal(file, start=40, seeds=2)
    run_seeds(stopped.left[:1], on_result=stopped.add)
    stopped.flush()
    with file.open("a") as torn:
        torn.write('{"seeds": 1, "batc')
    assert list(Journal(file, start=7, seeds=7).left) == [41]
    # What the writer that was killed has torn off is not glued to the next line.
    assert simulate.main(["--seeds", "1", "--start", "drawn", "--journal", str(file), "--jobs", "1", "--json"]) == 0
    resumed = json.loads(capsys.readouterr().out.splitlines()[-1])
    whole = run_seeds(range(40, 42))
    assert (resumed["start"], resumed["seeds"], resumed["batches"]) == (40, 2, whole.batches)
    assert resumed["violations"] == []
    assert {"checkpoints", "restores", "virtual_hours", "real_seconds"} <= resumed.keys()
    assert resumed["faults"] == {str(kind): whole.faults[kind] for kind in sorted(whole.faults)}
    assert list(Journal(file, start=0, seeds=1).left) == []


def test_a_journal_of_other_code_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Journal(tmp_path / "journal", start=1, seeds=1)
    monkeypatch.setattr(journal, "code_digest", lambda: "another")
    with pytest.raises(Invalid, match="another world"):
        Journal(tmp_path / "journal", start=1, seeds=1)


def test_a_drawn_start_is_another_at_every_run_and_printed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(simulate, "run_seeds", lambda *_, **__: Summary(seeds=1))
    for how in ("drawn", "drawn", "today"):
        assert simulate.main(["--seeds", "1", "--start", how, "--jobs", "1"]) == 0
    starts = [line for line in capsys.readouterr().err.splitlines() if line.startswith("seeds from")]
    assert len(set(starts)) == 3
    assert "000000," in starts[-1], "a million of each day's own"


def test_branches_that_no_seed_has_taken_are_named() -> None:
    names = ("dstl/checkpoint/assembly.py", "dstl/checkpoint/manifest/log.py")
    found = branches.untaken_branches([34], [ROOT / name for name in names])
    (count, untaken), (_, of_the_log) = (found[name] for name in names)
    assert 0 < len(untaken) < count
    # Lines behind an await in which an asynchronous generator has ended: with coverage's tracer they were lost.
    code = inspect.getsource(ManifestLog.fence).splitlines()
    begins = inspect.getsourcelines(ManifestLog.fence)[1]
    at = begins + next(n for n, line in enumerate(code) if "if highest == sequence" in line)
    assert (at, at + 1) not in of_the_log


def test_what_no_seed_enters_is_named_with_a_reason_and_nothing_else_is() -> None:
    every, named = set(branches.functions().values()), branches.reasons()
    assert sorted(named.keys() - every) == []
    entered = branches.entered_functions(lambda: (run_seed(34), run_file_seed(0)))
    assert branches.Function("dstl/files/index.py", "FileIndex.apply") in entered
    assert len(entered) > 1000
    assert sorted(entered & named.keys()) == []
