"""The hedging benchmark, in its short form: real policy, real uploader, the keys that are promised."""

import json
from pathlib import Path

import pytest

from bench import hedging
from bench.__main__ import main as bench_main
from bench._models import models

ROOT = Path(__file__).parents[2]
BOTH = {"p50", "p99", "p999", "p9999", "max500_p50", "max500_p99", "rate_503", "on_p99", "off_p999"}
HEDGED = {"extra_requests", "extra_bytes", "on_extra_requests", "worst60_extra", "won"}
SHORT = ["--puts", "10000", "--seeds", "1", "--json"]


def figures(capsys: pytest.CaptureFixture[str], *args: str) -> dict:
    assert hedging.main([*SHORT, *args]) == 0
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def test_calm_set_meets_its_promises(capsys):
    result = figures(capsys, "--model", "s3-standard-small")
    none, hedged = result["none"], result["hedged"]
    assert (result["model"], result["puts"], result["seeds"]) == ("s3-standard-small", 10_000, 1)
    assert set(none) >= BOTH
    assert set(hedged) >= BOTH | HEDGED
    assert none["on_p99"] is hedged["on_p99"] is hedged["on_extra_requests"] is None
    assert hedged["p50"] <= 1.01 * none["p50"]
    assert hedged["p999"] <= 0.4 * none["p999"]
    assert 0.02 < hedged["extra_requests"] <= 0.055
    assert 0 < hedged["extra_bytes"] <= hedged["extra_requests"]
    assert 0.1 < hedged["won"] < 0.6


def test_same_arguments_give_the_same_figures(capsys):
    one, other = (figures(capsys, "--model", "s3-express", "--writers", "50", "--puts", "3000") for _ in range(2))
    assert {**one, "wall_s": 0} == {**other, "wall_s": 0}


def test_own_parameters_from_a_file_with_throttling(capsys, tmp_path):
    values = models()["s3-standard-small"]
    values |= {"thr_rate": 1.02, "thr_burst": 1.5, "jitter_ms": 900}
    (tmp_path / "tight.json").write_text(json.dumps(values))
    result = figures(capsys, "--params", str(tmp_path / "tight.json"))
    assert result["model"] == "tight"
    assert result["hedged"]["rate_503"] <= result["none"]["rate_503"] + 0.006  # 20 s only: mostly the first encounter
    assert result["hedged"]["p99"] <= 1.08 * result["none"]["p99"]


def test_slow_periods_are_told_apart(capsys, tmp_path):
    values = models()["brownout"]
    values |= {"slow_on": 8, "slow_off": 10}
    (tmp_path / "short.json").write_text(json.dumps(values))
    result = figures(capsys, "--params", str(tmp_path / "short.json"))
    assert result["none"]["on_p99"] > 2 * result["none"]["p50"]
    assert result["hedged"]["on_p99"] <= 1.15 * result["none"]["on_p99"]
    assert result["hedged"]["extra_requests"] <= 0.055


def test_criticality_measures_what_a_checkpoint_waits_for(capsys):
    every, few = (
        figures(capsys, "--model", "flip158-5mb", "--puts", "4000", "--criticality", share) for share in ("1", "0.2")
    )
    assert few["hedged"]["p999"] < every["hedged"]["p999"]
    assert few["hedged"]["extra_requests"] <= 0.055


def test_plot_draws_both_arms(tmp_path):
    pytest.importorskip("matplotlib")
    drawn = tmp_path / "cdf.png"
    assert hedging.main(["--model", "s3-express", "--puts", "2000", "--seeds", "1", "--plot", str(drawn)]) == 0
    assert drawn.stat().st_size > 1000


def test_people_get_units_changes_a_verdict_and_a_warning(capsys):
    assert hedging.main(["--model", "s3-standard-small", "--puts", "4000", "--seeds", "1"]) == 0
    shown = capsys.readouterr().out
    assert [word in shown for word in ("unit", "change", "ms", "%")] == [True] * 4
    assert "Hedging shortens p99.9 by" in shown
    assert "p9999 is that of the 0.4 slowest PUTs: run with --puts 1,000,000" in shown
    assert "None" not in shown


def test_a_result_file_has_the_command_and_the_machine(tmp_path):
    out = tmp_path / "results" / "hedging.json"
    arguments = ["hedging", "--model", "s3-express", "--puts", "2000", "--seeds", "1"]
    assert bench_main([*arguments, "--out", str(out)]) == 0
    found = json.loads(out.read_text())
    assert found["command"] == f"python -m bench {' '.join(arguments)}"
    assert found["machine"]["cores"] > 0
    assert found["commit"]
    tail = found["figures"]["tail"]
    assert tail["beyond"][0] == 1.0
    assert tail["none"] == sorted(tail["none"])
    assert len(tail["hedged"]) == len(tail["beyond"])


@pytest.mark.parametrize("words", [[], ["nonsense"]])
def test_without_the_name_of_one_every_benchmark_gets_a_line(capsys, words):
    assert bench_main(words) == 2
    lines = [line.split(maxsplit=1) for line in capsys.readouterr().err.splitlines() if line.startswith("  ")]
    assert {name for name, _ in lines} >= {"append", "checkpoint", "hedging", "recovery", "space", "spark"}
    assert min(len(line) for _, line in lines) > 20
