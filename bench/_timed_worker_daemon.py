"""Spark's daemon of Python workers, in which tasks of ours write down where their time goes.

A session runs it with ``spark.python.daemon.module``. Each task adds a line of JSON to the file that the environment
names: its query, batch, and seconds by part. A call counts for its part from its sending, and for the time for which
its answer is waited for; what the worker does meanwhile counts for the worker.
"""

import json
import os
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import dstl.spark.task
from dstl.rpc.client import Address, Reply, Transport
from dstl.rpc.codec import Call
from dstl.spark.task_attempt import WorkerProcess, run_attempt

FILE = "DSTL_BENCH_TASK_TIMES"
_PARTS = {"begin": "begin", "open_attempt": "begin", "acknowledge": "acknowledge"}
"""By the call's name; others that write are ``write``, and those that read ``fetch``."""
_WRITES = ("write", "end_of_changes")


def _part_of(call: str) -> str:
    return _PARTS.get(call) or ("write" if call in _WRITES else "fetch")


class _TimedReply:
    def __init__(self, inner: Reply[Any], part: str, spent: Counter[str]) -> None:
        self._inner, self._part, self._spent = inner, part, spent

    @property
    def is_done(self) -> bool:
        return self._inner.is_done

    def result(self) -> Any:
        began = time.perf_counter()
        try:
            return self._inner.result()
        finally:
            self._spent[self._part] += time.perf_counter() - began


class _TimedTransport:
    def __init__(self, inner: Transport, spent: Counter[str]) -> None:
        self._inner, self._spent = inner, spent

    def send(self, message: Call[Any]) -> _TimedReply:
        part = _part_of(message.name)
        began = time.perf_counter()
        reply = self._inner.send(message)
        self._spent[part] += time.perf_counter() - began
        self._spent["calls"] += 1
        return _TimedReply(reply, part, self._spent)


def _timed(operator: Any, task: Any, batches: Iterable[Any], worker: WorkerProcess) -> Iterator[Any]:
    """Run an attempt as :func:`run_attempt` does, and write its times down."""
    began, cpu = time.perf_counter(), time.process_time()
    spent: Counter[str] = Counter()

    def rows() -> Iterator[Any]:
        given = iter(batches)
        while True:
            asked = time.perf_counter()
            batch = next(given, None)
            spent["input"] += time.perf_counter() - asked
            if batch is None:
                return
            spent["rows"] += batch.num_rows
            yield batch

    def connect(address: Address) -> Transport:
        return _TimedTransport(worker.connect(address), spent)  # type: ignore[return-value]

    for made in run_attempt(operator, task, rows(), replace(worker, connect=connect)):
        given = time.perf_counter()
        yield made
        spent["output"] += time.perf_counter() - given
    spent["cpu"] = time.process_time() - cpu
    waited = sum(spent[part] for part in ("begin", "fetch", "write", "acknowledge", "input", "output"))
    spent["worker"] = time.perf_counter() - began - waited
    line = json.dumps({"query": task.query_id, "batch": task.batch_id, "pid": os.getpid(), **spent}) + "\n"
    # One write that appends: workers share the file.
    place = os.open(os.environ[FILE], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.write(place, line.encode())
    finally:
        os.close(place)


if __name__ == "__main__":
    from pyspark import daemon

    dstl.spark.task.run_attempt = _timed  # type: ignore[assignment]
    daemon.manager()
