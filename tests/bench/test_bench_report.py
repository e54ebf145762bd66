"""The report draws what was measured, names its command and machine, and stands for itself."""

import json
import re
import xml.dom.minidom
from pathlib import Path
from typing import Any

import pytest

from bench import hedging, recovery, report
from bench._plots import adapted, plots_of, svg
from bench._stamp import stamp

CHECKPOINT = {
    "sizes": [
        {"state_mb": size, "changed_mb": 1.0, "checkpoint_ms": {"p50": 200.0, "p99": 300.0}} for size in (10.0, 100.0)
    ],
    "table": "heap",
    "store": "latency",
}
REQUESTS = {"rows": [{"partitions": each, "dstl_requests": 1, "spark_files": each} for each in (1, 4, 200)]}
SPARK = {"dstl_vectorised": 900_000, "spark_native": 1_000_000, "small_input": {"events": 1}}


def restored(log_mb: float) -> dict[str, Any]:
    times = {"restore_s": 1.0 + log_mb, "no_changelog_restore_s": 1.0, "raw_read_s": 0.5}
    return {"state_mb": 100.0, "log_mb": log_mb, "table": "heap", "store": "local", **times}


def result(bench: str, figures: dict[str, Any], *arguments: str) -> dict[str, Any]:
    return {**stamp(bench, arguments), "figures": figures}


def results() -> list[dict[str, Any]]:
    return [
        result("recovery", restored(20.0), "--log-share", "0.2"),
        result("recovery", restored(5.0), "--log-share", "0.05"),
        result("spark", SPARK),
        result("requests", REQUESTS),
        result("checkpoint", CHECKPOINT, "--state-mb", "10", "100"),
        result("space", {"ratio": 1.2}),
    ]


def test_what_was_measured_is_drawn_in_one_order_and_the_rest_is_left_out() -> None:
    plots = plots_of(results())
    assert [plot.anchor for plot in plots] == ["checkpoint-time", "requests", "throughput", "restore-time"]
    by_anchor = {plot.anchor: plot for plot in plots}
    assert by_anchor["requests"].lines["DSTL: requests"] == ([1, 4, 200], [1, 1, 1])
    assert by_anchor["throughput"].bars == {"dstl_vectorised": 900_000.0, "spark_native": 1_000_000.0}
    # Several runs are one line, by the length of their log.
    assert by_anchor["restore-time"].lines["restore"] == ([5.0, 20.0], [6.0, 21.0])
    assert len(by_anchor["restore-time"].results) == 2
    twice = plots_of([result("spark", SPARK), result("spark", SPARK)])
    assert [plot.anchor for plot in twice] == ["throughput", "throughput-2"]


def test_a_page_has_each_plot_with_its_command_and_machine_and_loads_nothing() -> None:
    plots = plots_of(results())
    made = report.page(plots, ["<svg></svg>"] * len(plots))
    for plot in plots:
        assert f'<h2 id="{plot.anchor}">' in made
        assert f'<a href="#{plot.anchor}">' in made
    assert "python -m bench checkpoint --state-mb 10 100" in made
    assert made.count(" cores, ") == 5
    assert not re.search(r"""(src|href)=["'](?!#)|@import|url\(""", made)


def test_the_ink_of_a_drawing_is_the_colour_of_the_text_around_it() -> None:
    drawn = adapted('<?xml version="1.0"?><svg width="1"><metadata>x</metadata><path style="stroke: #010203"/></svg>')
    assert drawn.startswith('<svg width="1"><style>')
    assert "prefers-color-scheme:dark" in drawn
    assert "#010203" not in drawn
    assert "metadata" not in drawn


def test_short_runs_become_a_page_and_drawings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib", reason="plots need the extra bench")
    files = []
    for name, module, arguments in (
        ("hedging", hedging, ["--model", "s3-express", "--puts", "2000", "--seeds", "1", "--json"]),
        ("recovery", recovery, ["--state-mb", "1", "--rounds", "1", "--batch-mb", "0.1", "--json"]),
    ):
        assert module.main(arguments) == 0
        figures = json.loads(capsys.readouterr().out.splitlines()[-1])
        files.append(tmp_path / f"{name}.json")
        files[-1].write_text(json.dumps(result(name, figures, *arguments[:-1])))
    page, drawings = tmp_path / "report.html", tmp_path / "svg"
    assert report.main([*map(str, files), "--html", str(page), "--svg", str(drawings)]) == 0
    assert sorted(path.name for path in drawings.iterdir()) == ["put-latency-s3-express.svg", "restore-time.svg"]
    for path in drawings.iterdir():
        xml.dom.minidom.parse(str(path))
        assert path.read_text() in page.read_text()
    for plot in plots_of(results()):
        assert "currentColor" in svg(plot)


def test_a_file_that_is_no_result_is_refused(tmp_path: Path) -> None:
    other = tmp_path / "x.json"
    other.write_text('{"bench": "spark"}')
    with pytest.raises(SystemExit, match=r"is no result: parts are missing; make one with python -m bench NAME --out"):
        report.main([str(other)])
    other.write_text(json.dumps(result("space", {})))
    with pytest.raises(SystemExit, match="nothing to draw"):
        report.main([str(other)])
