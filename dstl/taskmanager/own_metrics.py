"""The metrics of a TaskManager that nobody records on the way: sizes of its tables, memory and processor time."""

from __future__ import annotations

import os
import resource
import sys

from dstl.metrics import MetricSet, Recorder, Sample
from dstl.taskmanager.state_backend import TaskManagerStateBackend

__all__ = ["TaskManagerMetrics"]


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
        for uid, table in backend.tables.items():
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
            {"residentBytes": _resident_bytes(usage.ru_maxrss)}, {"processCpuSeconds": usage.ru_utime + usage.ru_stime}
        )


def _resident_bytes(highest: int) -> int:
    """Return the process's resident memory; where only the highest there was is known, that."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return highest if sys.platform == "darwin" else highest * 1024
