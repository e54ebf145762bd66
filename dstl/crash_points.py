"""Named points at which a test lets a process die, or stop and go on much later.

The points are where a crash leaves something half done. Nothing happens at any unless the environment names one:
``DSTL_TEST_CRASH_POINT=point:hit:way:mark``, say ``M3:2:kill:/tmp/x/mark``. The process that reaches the point so many
times, and is the first to make the file ``mark``, in which it writes its id, sends itself ``SIGKILL`` (``kill``) or
``SIGSTOP`` (``stop``).
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping

VARIABLE = "DSTL_TEST_CRASH_POINT"

POINTS: Mapping[str, str] = {
    "W1": "the attempt has begun and sent nothing",
    "W2": "a part of its changes is sent, and its reply was not looked at",
    "W3": "its change set is complete, and the next part of it is not sent",
    "W4": "all its changes are taken, and it has not acknowledged",
    "W5": "it has acknowledged, and its output is not complete",
    "W6": "its output is complete, and Spark has not heard of it",
    "T1": "changes are buffered",
    "T2": "change sets are closed, and not sealed",
    "T3": "a PUT is under way",
    "T4": "a PUT is done, and its handle is not recorded",
    "T5": "a hedge is sent",
    "T6": "a winner is chosen while the loser is under way",
    "T7": "a persist is done, and its handles are not returned",
    "T8": "the completion has come, and no log is truncated",
    "T9": "one log is truncated",
    "T10": "the TaskManager begins to shut down",
    "T11": "its socket is bound, and it is not registered",
    "C1": "Spark commits a batch, and its checkpoint is triggered",
    "C2": "some tasks have acknowledged",
    "C3": "every part is persisted, and there is no manifest",
    "C4": "a manifest was sent, and its answer is not read",
    "C5": "the manifest is committed, and no TaskManager is notified",
    "C6": "one TaskManager is notified",
    "C7": "a subsumed checkpoint's references are released, and nothing is deleted",
    "C8": "the subsumed manifests are deleted, and the files that they name are not",
    "C9": "some files of one deletion are deleted",
    "C10": "a fence is written, and not known to be the newest record",
    "C11": "the log is taken over, and its records are not read",
    "C12": "some orphans are deleted",
    "C13": "the boundary has moved, and nothing below it is deleted",
    "C14": "Spark takes a batch for committed, and no record holds its commit",
    "C15": "a batch begins, and no record holds its offsets",
    "M1": "the checkpoint of a materialization is fixed",
    "M2": "its snapshot is taken",
    "M3": "one of its files is stored",
    "M4": "all its files are stored, and it is not registered",
    "M5": "it is registered, and in no checkpoint",
    "M6": "it is in a committed checkpoint, and the log is not truncated",
    "M7": "one operator's bases are exchanged",
    "R1": "the retained checkpoints are read, and nothing is restored",
    "R2": "some key groups are loaded from a base",
    "R3": "a piece of the log is replayed",
    "R4": "the tables can be used, and that was not reported",
    "R5": "a piece of the log has come to one operator's table, and is not counted",
    "R6": "a run is restored, and has made no checkpoint",
    "R7": "a key group's base has come below its changes, while batches run",
    "S1": "a savepoint's files are stored, and its descriptor is not",
    "S2": "a savepoint's descriptor is stored, and its maker does not know",
}
"""By name: W of a worker, T of a TaskManager, C of the coordinator, M of a materialization, R of a restore, S of a
savepoint."""

_SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}


def _nothing(point: str) -> None:
    """Do nothing: no test has named a point."""


def _strike_at(order: str) -> Callable[[str], None]:
    """Return what strikes at the point that is named."""
    wanted, hit, way, mark = order.split(":", 3)
    if wanted not in POINTS:
        raise ValueError(f"{VARIABLE}: there is no point {wanted!r}")
    left = int(hit)

    def strike(point: str) -> None:
        nonlocal left
        if point != wanted:
            return
        left -= 1
        if left:
            return
        try:
            descriptor = os.open(mark, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
        except FileExistsError:
            # Another process was here before.
            return
        os.write(descriptor, str(os.getpid()).encode())
        os.close(descriptor)
        os.kill(os.getpid(), _SIGNALS[way])

    return strike


reach: Callable[[str], None] = _strike_at(os.environ[VARIABLE]) if VARIABLE in os.environ else _nothing
"""Record that a point of :data:`POINTS` is reached."""
