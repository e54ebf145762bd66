"""Metrics of a TaskManager that are measured when asked for: sizes of its tables, memory and processor time."""

from __future__ import annotations

import resource

from dstl.metrics import MetricSet, Recorder, Sample
from dstl.taskmanager.memory_limit import resident_bytes
from dstl.taskmanager.state_backend import TaskManagerStateBackend


def note_state(recorder: Recorder, backend: TaskManagerStateBackend) -> dict[str, tuple[int, int]]:
    """Record and return entries and bytes of the tables, by operator."""
    state: dict[str, tuple[int, int]] = {}
    for uid, table in backend.committed.all().items():
        size = table.size()
        state[uid] = (size.entries, size.bytes)
        recorder.gauge(f"stateEntries.{uid}", size.entries)
        recorder.gauge(f"stateBytes.{uid}", size.bytes)
    recorder.gauge("ownedKeyGroups", len(backend.key_groups))
    return state


def process_sample(recorder: Recorder) -> Sample:
    """Return all values at this moment, the process's too; of what is no :class:`MetricSet`, none. Thread-safe."""
    if not isinstance(recorder, MetricSet):
        return Sample()
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return recorder.sample({"residentBytes": resident_bytes()}, {"processCpuSeconds": usage.ru_utime + usage.ru_stime})
