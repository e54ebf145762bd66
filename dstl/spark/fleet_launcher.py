"""Keeping the TaskManagers of a local application running."""

from __future__ import annotations

import logging
import threading
from dataclasses import replace

from dstl.taskmanager.launcher import TaskManagerConfig, TaskManagerProcess

__all__ = ["FleetLauncher"]

_log = logging.getLogger(__name__)
_MOST_REPLACEMENTS = 100


class FleetLauncher:
    """Starts the driver's TaskManagers and replaces those that die. Thread-safe.

    Attributes:
        config: What each is given; its ``member_id`` is filled in.
    """

    def __init__(self, size: int) -> None:
        self.config: TaskManagerConfig | None = None
        self._size = size
        self._lock = threading.Lock()
        self._processes: dict[str, TaskManagerProcess] = {}
        self._started = 0
        self._stopped = False

    def start(self) -> None:
        """Start the TaskManagers, once."""
        with self._lock:
            while self._started < self._size:
                self._launch()

    def replace(self, member_id: str) -> None:
        """Start another TaskManager in place of one that is gone.

        After a hundred of them it gives up, for then something ends every one: queries wait in vain and say so.
        """
        with self._lock:
            gone = self._processes.pop(member_id, None)
            if self._stopped or gone is None:
                return
            if self._started - self._size >= _MOST_REPLACEMENTS:
                _log.error("%d TaskManagers have died: no more are started", self._started)
                return
            self._launch()
        gone.stop(timeout=0.0)

    def stop(self) -> None:
        """End all TaskManagers. Idempotent."""
        with self._lock:
            self._stopped = True
            processes = list(self._processes.values())
            self._processes.clear()
        for process in processes:
            process.stop()

    def _launch(self) -> None:
        assert self.config is not None
        self._started += 1
        member_id = f"taskmanager-{self._started}"
        self._processes[member_id] = TaskManagerProcess(replace(self.config, member_id=member_id))
