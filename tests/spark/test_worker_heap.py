"""Workers freeze what their modules have left, and nothing of a task."""

import json
import subprocess
import sys

_WORKER = """
import gc, json, weakref
from dstl.spark.worker_process import count_task

class Cycle:
    def __init__(self):
        self.itself = self

seen = []
for task in range(1, 131):
    if task == 100:
        import colorsys
    dropped = weakref.ref(Cycle())
    before = gc.get_freeze_count()
    count_task()
    # The collector has run where it froze, so that garbage of the task is gone rather than kept for ever.
    if gc.get_freeze_count() != before:
        seen.append(task)
        assert dropped() is None, task
print(json.dumps([seen, gc.get_freeze_count(), gc.collect()]))
"""


def test_a_worker_freezes_after_its_first_tasks_and_imports_and_never_their_garbage() -> None:
    # Frozen objects of this process would change what other tests see: a process of its own.
    run = subprocess.run([sys.executable, "-c", _WORKER], capture_output=True, text=True, timeout=60, check=True)
    at, frozen, _ = json.loads(run.stdout)
    assert at[0] == 1
    assert set(at) <= {1, 2, 4, 8, 16, 32, 64, 100}
    assert 100 in at
    assert frozen > 1_000
