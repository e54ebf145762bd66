"""The heap of a Python worker: what its modules have left is kept out of the collection that follows every task.

PySpark calls :func:`gc.collect` after each task. In a worker that has imported pyspark, pyarrow and pandas it walks all
that they have left, which never becomes garbage.
"""

from __future__ import annotations

import gc
import sys

__all__ = ["count_task"]

_LAST_FREEZE = 64
"""Number of the last task after which a worker freezes in any case: by then it has made what it keeps from task to
task."""

_tasks = 0
"""Tasks that this process has ended; a worker is forked before its first."""
_modules = 0
"""Modules that were there at the last freeze."""


def count_task() -> None:
    """Count a task that has ended, and freeze the heap after the first, second, fourth and so on up to the 64th.

    Also after every task that has imported something, whichever it is: workers outlive queries. What is garbage is
    collected before, so that nothing of the task itself is kept. To be called at the task's end, in the thread that
    ran it.
    """
    global _tasks, _modules
    _tasks += 1
    if (_tasks <= _LAST_FREEZE and _tasks.bit_count() == 1) or len(sys.modules) > _modules:
        gc.collect()
        gc.freeze()
        _modules = len(sys.modules)
