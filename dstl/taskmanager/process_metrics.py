"""Metrics of a TaskManager that are measured when asked for: sizes of its tables, memory and processor time."""

from __future__ import annotations

import resource

from dstl.metrics import MetricSet, Recorder, Sample
from dstl.taskmanager.memory_limit import resident_bytes
from dstl.taskmanager.state_backend import TaskManagerStateBackend


class TaskManagerMetrics:
    """Adds the state's and the process's figures to a TaskManager's metrics. One event loop, but for :meth:`sample`.

    Args:
        recorder: Of all its parts; where it is no :class:`MetricSet`, samples are empty.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def note_state(self, backend: TaskManagerStateBackend) -> dict[str, tuple[int, int]]:
        """Record and return entries and bytes of the tables, by operator."""
        state: dict[str, tuple[int, int]] = {}
        for uid, table in backend.committed.all().items():
            size = table.size()
            state[uid] = (size.entries, size.bytes)
            self._recorder.gauge(f"stateEntries.{uid}", size.entries)
            self._recorder.gauge(f"stateBytes.{uid}", size.bytes)
        owned = backend.key_groups
        self._recorder.gauge("ownedKeyGroups", owned.end - owned.start + 1 if owned is not None else 0)
        return state

    def sample(self) -> Sample:
        """Return all values at this moment. Thread-safe."""
        recorder = self._recorder
        if not isinstance(recorder, MetricSet):
            return Sample()
        usage = resource.getrusage(resource.RUSAGE_SELF)
        return recorder.sample(
            {"residentBytes": resident_bytes()}, {"processCpuSeconds": usage.ru_utime + usage.ru_stime}
        )
