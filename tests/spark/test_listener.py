"""Listeners: one line a checkpoint, a warning and an alarm for a slow one, and metrics under known names."""

import dataclasses
import logging

import pytest

from dstl.errors import Invalid
from dstl.spark.listener import CheckpointLog, CheckpointMetrics, CheckpointReport, RestoreReport
from worlds.memory_recorder import MemoryRecorder


def checkpoint(seconds: float) -> CheckpointReport:
    return CheckpointReport(
        checkpoint_id=7,
        batch_id=5,
        seconds=seconds,
        requests=2,
        new_bytes=100,
        full_bytes=900,
        inlined=0,
        estimated_recovery_seconds=2.5,
    )


def test_a_slow_checkpoint_is_a_warning_and_an_alarm(caplog: pytest.LogCaptureFixture) -> None:
    alarms: list[CheckpointReport] = []
    listener = CheckpointLog(slow_after_s=1.0, on_slow=alarms.append)
    with caplog.at_level(logging.INFO, "dstl.checkpoints"):
        listener(checkpoint(0.5))
        listener(checkpoint(1.5))
    assert [record.levelname for record in caplog.records] == ["INFO", "WARNING"]
    assert (
        "checkpoint 7 of batch 5 took 1.500 s: 2 requests, 100 new bytes, 900 in all; about 2.5 s to recover"
        in caplog.text
    )
    assert [alarm.seconds for alarm in alarms] == [1.5]


def test_rows_that_were_dropped_as_late_are_said_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    report = dataclasses.replace(checkpoint(0.5), late_rows={"sessions": 3, "windows": 4})
    with caplog.at_level(logging.INFO, "dstl.checkpoints"):
        CheckpointLog()(report)
    assert [record.levelname for record in caplog.records] == ["INFO", "WARNING", "WARNING"]
    assert "operator 'windows' dropped 4 rows of batch 5" in caplog.text
    recorder = MemoryRecorder()
    CheckpointMetrics(recorder)(report)
    assert {name: n for name, n in recorder.counters.items() if "Late" in name} == {
        "numLateRecordsDropped.sessions": 3,
        "numLateRecordsDropped.windows": 4,
    }


def test_the_watermark_of_the_slowest_operator_is_said_and_shown(caplog: pytest.LogCaptureFixture) -> None:
    report = dataclasses.replace(checkpoint(0.5), watermarks={"sessions": 12_000, "windows": 9_500})
    with caplog.at_level(logging.INFO, "dstl.checkpoints"):
        CheckpointLog()(report)
    assert "about 2.5 s to recover; watermark 9500 ms since 1970" in caplog.text
    recorder = MemoryRecorder()
    CheckpointMetrics(recorder)(report)
    assert recorder.snapshot()["currentInputWatermark"] == 9_500


def test_a_restore_is_logged_with_what_it_read(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "dstl.checkpoints"):
        CheckpointLog()(RestoreReport(run_id="r", checkpoint_id=6, seconds=0.25, bytes=10, changes=3))
    assert "restored checkpoint 6 in 0.250 s (10 bytes, 3 changes) for run r" in caplog.text


def test_metrics_are_counted() -> None:
    recorder = MemoryRecorder()
    listener = CheckpointMetrics(recorder)
    listener(checkpoint(0.5))
    listener(checkpoint(1.5))
    listener(RestoreReport(run_id="r", checkpoint_id=6, seconds=0.25, bytes=10, changes=3))
    flat = recorder.snapshot()
    assert flat["numberOfCompletedCheckpoints"] == 2
    assert flat["checkpointSeconds.p99"] == 1.5
    assert flat["lastIncSizeOfNonMaterialization"] == 100
    assert flat["estimatedRecoverySeconds"] == 2.5
    assert flat["numRestores"] == 1


def test_a_threshold_of_nothing_is_refused() -> None:
    with pytest.raises(Invalid):
        CheckpointLog(slow_after_s=0)
