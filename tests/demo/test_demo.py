"""The main job in its short form: few batches, every kind of kill, and a verdict that can fail."""

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest
from typer.testing import CliRunner

from dstl.cli import application
from dstl.demo import main_job
from dstl.demo.aircraft import expected_result
from dstl.demo.flights import load_flights, write_batches
from dstl.demo.supervisor import Recovery
from dstl.errors import Invalid
from worlds.s3_place import S3Place


def demo(*arguments: str) -> dict[str, Any]:
    """Run it with every kind of kill, and return its report."""
    command = [sys.executable, "-m", "dstl.cli", "demo", "--kill", "all", "--batches", "8", "--json", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    report: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return report


@pytest.mark.spark
def test_the_main_job_survives_every_kill(tmp_path: Path, seed: int) -> None:
    report = demo("--seed", str(seed), "--store", str(tmp_path / "s"))
    assert report["ok"] is True
    assert report["kills"] == ["worker", "taskmanager", "driver"]
    assert (report["events"], report["keys"]) == (336_776, 4_044)
    # A driver that is killed between the source's log of files and Spark's own of offsets leaves a file that is in no
    # batch, and Spark reads it together with the next one.
    assert report["batches"] in (7, 8)
    assert (report["state_differences"], report["output_differences"]) == (0, 0)
    assert report["restarts"] >= 1
    assert report["requests_per_checkpoint"] <= 2
    assert report["recovery_s"] > 0.1, "a process has to start in it"


def test_checkpoints_that_were_in_the_pipe_before_a_kill_end_no_recovery() -> None:
    recovery = Recovery(killed_at=10.0)
    before: list[dict[str, Any]] = [{"event": "restart", "at": 9.0}, {"event": "checkpoint", "at": 9.9}]
    after: list[dict[str, Any]] = [{"event": "started", "at": 13.0}, {"event": "restore", "at": 14.5}]
    assert not any(recovery.ends_with(event) for event in (*before, *after))
    assert recovery.ends_with({"event": "checkpoint", "at": 17.0})
    assert recovery.parts() == {"all": 7.0, "spark": 3.0, "restore": 1.5, "batch": 2.5}


@pytest.mark.spark
@pytest.mark.s3server
@pytest.mark.long
@pytest.mark.filterwarnings("ignore:datetime.datetime.utcnow:DeprecationWarning")
def test_the_main_job_survives_every_kill_with_its_state_on_s3(s3_place: S3Place, seed: int) -> None:
    place = ["--store", f"{s3_place.location}/demo", "--endpoint-url", s3_place.endpoint_url]
    report = demo("--seed", str(seed), *place)
    assert (report["ok"], report["kills"]) == (True, ["worker", "taskmanager", "driver"])
    assert (report["state_differences"], report["output_differences"]) == (0, 0)


def test_a_kill_that_does_not_exist_and_too_few_batches_are_refused() -> None:
    for wrong in (
        ["--kill", "everyone"],
        ["--kill", "all", "--batches", "2"],
        ["--kill", "worker", "--master", "spark://elsewhere:7077"],
        ["--work", "/nowhere/at/all"],
    ):
        done = CliRunner().invoke(application(), ["demo", *wrong])
        assert done.exit_code == 2
        assert "Invalid: " in done.stderr


def test_without_java_the_demo_says_so_in_a_sentence(tmp_path: Path) -> None:
    done = CliRunner(env={"PATH": str(tmp_path), "JAVA_HOME": ""}).invoke(application(), ["demo"])
    assert done.exit_code == 2
    assert "install a JDK 17" in done.stderr


def test_a_pyspark_before_4_1_2_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    import pyspark

    monkeypatch.setattr(pyspark, "__version__", "4.1.1")
    with pytest.raises(Invalid, match=r"PySpark 4\.1\.1 is too old"):
        main_job.check_prerequisites()


def test_the_flights_are_whole_and_in_order(tmp_path: Path) -> None:
    flights = load_flights()
    assert flights.num_rows == 336_776
    assert flights.column("tail").null_count == 2_512
    assert flights.column("number").to_pylist() == list(range(336_776))
    write_batches(flights, tmp_path, 7)
    files = sorted(tmp_path.glob("*.parquet"))
    assert len(files) == 7
    assert sum(pa.parquet.read_metadata(file).num_rows for file in files) == 336_776


def test_no_two_files_are_equally_old_for_spark_would_take_them_in_any_order(tmp_path: Path) -> None:
    write_batches(load_flights().slice(0, 100), tmp_path, 7)
    ages_ms = [int(path.stat().st_mtime * 1000) for path in sorted(tmp_path.iterdir())]
    assert ages_ms == sorted(set(ages_ms))
    assert len(ages_ms) == 7


def test_the_expected_result_on_a_hand_made_year() -> None:
    rows = [
        ("N1", "EWR", 100, 0),
        ("N1", "JFK", 100, 61),
        ("N1", "JFK", 100, None),
        ("N1", "JFK", 100, 90),
        (None, "LGA", 50, None),
        ("N1", "JFK", 100, 70),
        ("N1", "EWR", 100, -5),
    ]
    table = pa.table(
        {
            "number": list(range(len(rows))),
            "tail": pa.array([row[0] for row in rows], pa.string()),
            "origin": [row[1] for row in rows],
            "distance": [row[2] for row in rows],
            "delay": pa.array([row[3] for row in rows], pa.int64()),
        }
    )
    states, alerts = expected_result(table)
    assert states == {"N1": ("EWR", 6, 1, 500, 221, 0), None: (None, 1, 1, 0, 0, 0)}
    assert alerts == Counter(
        {
            ("N1", 1, "moved", "EWR to JFK"): 1,
            ("N1", 6, "moved", "JFK to EWR"): 1,
            ("N1", 5, "late", "3 in a row"): 1,
        }
    )


def test_a_wrong_state_or_a_missing_row_is_a_difference(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    # The verdict itself must be able to fail.
    from dstl.demo.job import JobConfig

    table = pa.table(
        {
            "number": [0, 1],
            "tail": ["N1", "N1"],
            "origin": ["EWR", "JFK"],
            "distance": [1, 1],
            "delay": [0, 0],
        }
    )
    states, alerts = expected_result(table)

    async def held(_: JobConfig) -> tuple[int, dict[Any, Any]]:
        return 8, dict(states)

    monkeypatch.setattr(main_job, "_states", held)
    monkeypatch.setattr(main_job, "_alerts", lambda _: Counter(alerts))
    config = JobConfig(str(tmp_path), str(tmp_path), None, 1)
    sound = {"keys": 1, "rows": 1, "batches": 8, "state_differences": 0, "output_differences": 0}
    assert main_job.judge(config, table) == sound
    states["N1"] = ("EWR", 9, 9, 9, 9, 9)
    alerts.clear()
    assert main_job.judge(config, table) == sound | {"state_differences": 1, "output_differences": 1}
