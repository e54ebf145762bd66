"""The launcher of a local application's TaskManagers."""

from __future__ import annotations

import logging
import threading
from collections.abc import Container
from dataclasses import replace

from dstl.process.launch_spec import LaunchSpec, TaskManagerProcess

_log = logging.getLogger(__name__)
_MOST_EARLY_ENDS = 5
"""In a row: one may be killed for the machine's memory, and so may its successor; five say that every one ends."""
START_S = 120.0
"""A TaskManager serves within seconds of its start, on a machine with much else to do within half a minute."""


class FleetLauncher:
    """Starts the driver's TaskManagers and replaces those that die, also before they have registered. Thread-safe.

    Attributes:
        spec: What each is given; its ``member_id`` is filled in. None on a cluster, where this starts nothing.
        registered: The names of those that have registered; None where nobody tells: then one that hangs before it
            has registered is not found out.
    """

    def __init__(self, size: int) -> None:
        self.spec: LaunchSpec | None = None
        self.registered: Container[str] | None = None
        self._size = size
        self._lock = threading.Lock()
        self._processes: dict[str, TaskManagerProcess] = {}
        self._started = 0
        self._early_ends = 0
        self._stopped = False

    def start(self) -> None:
        """Start the TaskManagers, once."""
        with self._lock:
            while self.spec is not None and self._started < self._size:
                self._launch()

    def lost(self, member_id: str) -> None:
        """Start another TaskManager in place of one that had registered and is gone."""
        with self._lock:
            self._early_ends = 0
        self.replace(member_id)

    def replace(self, member_id: str) -> None:
        """Start another TaskManager in place of one that is gone. Idempotent.

        After five in a row of which none has registered it gives up, for then something ends every one: queries wait
        in vain and say so. Those that are lost later are lost to a query's work, which ends where that goes on.
        """
        with self._lock:
            gone = self._processes.pop(member_id, None)
            if gone is None or self._stopped:
                return
            self._early_ends += 1
            if self._early_ends <= _MOST_EARLY_ENDS:
                self._launch()
            else:
                _log.error(
                    "%d TaskManagers in a row ended early: no more are started; see what they wrote", self._early_ends
                )
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
        assert self.spec is not None
        self._started += 1
        member_id = f"taskmanager-{self._started}"
        process = self._processes[member_id] = TaskManagerProcess(replace(self.spec, member_id=member_id))
        threading.Thread(target=self._watch, args=(member_id, process), name=f"dstl-{member_id}", daemon=True).start()

    def _watch(self, member_id: str, process: TaskManagerProcess) -> None:
        if not process.wait(START_S):
            if self.registered is None or member_id in self.registered:
                process.wait()
            else:
                _log.warning("TaskManager %s has not registered within %g s: it is given up", member_id, START_S)
        self.replace(member_id)
