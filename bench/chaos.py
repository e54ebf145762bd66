"""``chaos``: a job on a cluster whose processes are killed and paused, and whose store fails all the time.

A standalone Spark cluster of two hosts (127.0.0.2 and 127.0.0.3) runs the job, and an S3 server in this process answers
some requests with 503 (having done nothing, or all), slowly, not at all, or does them and breaks the connection. Every
``--kill-every`` seconds a Python worker, a TaskManager, an executor or the driver is killed, or stands still for a
while. Rows come all along. In the end the faults stop, the rest is processed, and what came out and the states are
compared with what the rows' maker knows.

- ``alerts``: a state machine per address on a ``StateBackend``. Some events are planted invalid ones: each must raise
  one alert.
- ``spark``: the same processor on Spark's own ``transformWithState``, with its checkpoint directory on ``dstl://``.
- ``lists``: appends to lists, which are looked up all the while; each lookup must fit in one order of all batches.
"""

import argparse
import contextlib
import json
import os
import queue
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from bench._figures import add_json, print_figures
from bench._list_append import Lists, Lookup
from bench._state_machine import Machines
from dstl.spark import jar_path
from tests.worlds.driver_process import LOCAL, DriverProcess
from tests.worlds.s3_server import S3Server
from tests.worlds.standalone_cluster import HOSTS, QUICK, StandaloneCluster

ROOT = Path(__file__).parents[1]
KILLS = ("worker", "taskmanager", "executor", "driver")
FAULTS = ("error", "stored", "slow", "reset", "lost")
JOBS = ("alerts", "spark", "lists")
WRONG = (
    *("false_alerts", "missed_alerts", "state_differences"),
    *("wrong_lists", "wrong_outputs", "wrong_lookups", "cycles"),
)
"""Figures that must be 0; each job has some of them."""
_BUCKET = "chaos"
_DRAIN_S = 600.0
_PAUSE_SHARE = 0.2
_LONGEST_PAUSE_S = 100.0  # one in seven is longer than the silence after which a process is given up
_STORE = "spark.sql.streaming.stateStore"
_SPARKS_OWN = {
    "spark.jars": jar_path(),
    "spark.plugins": "dstl.spark.DstlPlugin",
    "spark.dstl.python": sys.executable,
    f"{_STORE}.providerClass": "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider",
    f"{_STORE}.rocksdb.changelogCheckpointing.enabled": "true",
    f"{_STORE}.minDeltasForSnapshot": "5",
    f"{_STORE}.maintenanceInterval": "5s",
}
"""A session whose operators keep their state on Spark's store, and their directories on ours."""


class Chaos:
    """One run."""

    def __init__(self, args: argparse.Namespace, work: Path, cluster: StandaloneCluster, server: S3Server) -> None:
        self._args = args
        self._work = work
        self._cluster = cluster
        self._server = server
        self._rng = random.Random(args.seed)
        self.made = Lists(args.seed) if args.job == "lists" else Machines(args.addresses, args.error_rate, args.seed)
        self.kills: Counter[str] = Counter()
        self.pauses: Counter[str] = Counter()
        self.restarts: Counter[str] = Counter()
        self.batches = 0
        self.starts = 0
        self._files = 0
        self._driver: DriverProcess | None = None
        self._config = {
            "master": cluster.master,
            "job": args.job,
            "work": str(work),
            "location": f"s3://{_BUCKET}/job",
            "endpoint_url": server.endpoint_url,
            # Some changes ride in the manifest and others go up as segments.
            "inline_threshold": 4096,
            "files": 20,
            "conf": {
                **LOCAL,
                "spark.driver.extraJavaOptions": QUICK,
                "spark.executor.cores": "1",
                "spark.executor.memory": "512m",
                "spark.executor.extraJavaOptions": QUICK,
                "spark.task.maxFailures": "4",
                "spark.sql.shuffle.partitions": "4",
                "spark.python.unix.domain.socket.enabled": "true",
                "spark.sql.warehouse.dir": str(work / "warehouse"),
                "spark.local.dir": str(work / "local"),
                "spark.dstl.commit": args.commit,
                **({**_SPARKS_OWN, "spark.dstl.s3.endpoint_url": server.endpoint_url} if args.job == "spark" else {}),
            },
        }

    def run(self) -> dict[str, Any]:
        """Make events and faults for ``--minutes``, then let the rest be processed, and return the figures."""
        (self._work / "in").mkdir()
        self._feed()
        self._start()
        self._until("batch", 300.0)
        stop_faults = threading.Event()
        faults = threading.Thread(target=self._fail_requests, args=(stop_faults,), daemon=True)
        faults.start()
        began = time.monotonic()
        end, next_kill = began + 60 * self._args.minutes, began + self._args.kill_every
        fed = self.made.events
        while (now := time.monotonic()) < end:
            due = fed + int((now - began) * self._args.rate)
            if self.made.events < due:
                self._feed()
            self._hear(0.05)
            if now >= next_kill:
                next_kill += self._args.kill_every
                self._strike()
        stop_faults.set()
        faults.join()
        self._server.faults.clear()
        self._server.latency_s = 0.0
        drained = self._drain()
        seconds = time.monotonic() - began
        compared = self._compare(json.loads((self._work / "result.json").read_text()))
        fired = Counter(kind for kind, _, _ in self._server.fired)
        return {
            "job": self._args.job,
            "events": self.made.events,
            "events_per_s": round(self.made.events / seconds, 1),
            "kills": {kind: self.kills[kind] for kind in KILLS},
            "pauses": {kind: self.pauses[kind] for kind in KILLS},
            "restarts": sum(self.restarts.values()),
            "drivers": self.starts,
            "batches": self.batches,
            **compared,
            "store_faults": {kind: fired[kind] for kind in FAULTS},
            "store_requests": sum(self._server.requests.values()),
            "drain_s": round(drained, 1),
            "seed": self._args.seed,
        }

    def _compare(self, result: dict[str, Any]) -> dict[str, int]:
        states = dict(result["states"])
        if isinstance(self.made, Machines):
            return self.made.compare([tuple(each) for each in result["out"]], states)
        lines = [line for log in self._work.glob("lookups-*.jsonl") for line in log.read_text().splitlines(True)]
        # A driver that is killed leaves half a line.
        read = [json.loads(line) for line in lines if line.endswith("\n")]
        lookups = [Lookup(began, ended, key, tuple(elements)) for began, ended, key, elements in read]
        return self.made.compare([(key, before, found) for key, before, found in result["out"]], states, lookups)

    def _feed(self) -> None:
        rows = self.made.make(self._args.file_events)
        columns = [pa.array(column) for column in zip(*rows, strict=True)]
        staged = self._work / "staged.parquet"
        pq.write_table(pa.table(columns, names=["address", "number", "event"]), staged)
        # Spark takes the oldest file first, by milliseconds.
        at = 1_700_000_000 + self._files
        os.utime(staged, (at, at))
        staged.rename(self._work / "in" / f"{self._files:06d}.parquet")
        self._files += 1

    def _start(self) -> None:
        self.starts += 1
        environment = {**self._cluster.environment, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}
        log = self._work / "driver.log"
        self._driver = DriverProcess(ROOT / "bench" / "_chaos_job.py", self._config, environment, log)

    def _hear(self, seconds: float) -> str:
        """Take what the driver tells, and start another where it has ended."""
        assert self._driver is not None
        try:
            event = self._driver.events.get(timeout=seconds)
        except queue.Empty:
            return ""
        kind = str(event["event"])
        self.batches += kind == "batch"
        if kind == "restart":
            self.restarts[event["why"][:120]] += 1
            print(f"restart: {event['why'][:200]}", file=sys.stderr)
        if kind == "ended":
            self._driver.process.wait()
            if self._args.verbose:
                print(f"the driver ended with {self._driver.process.returncode}", file=sys.stderr)
            self._start()
        return kind

    def _until(self, kind: str, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while self._hear(0.2) != kind:
            if time.monotonic() > deadline:
                log = (self._work / "driver.log").read_text(errors="replace")[-4000:]
                raise SystemExit(f"no {kind} within {seconds:g} s; the driver's log ends with:\n{log}")

    def _drain(self) -> float:
        """Let the job process what is left; starts another driver where that takes one."""
        began = time.monotonic()
        assert self._driver is not None
        self._driver.stop()
        told = self._driver
        while True:
            kind = self._hear(0.2)
            if kind == "finished":
                self._driver.process.wait(60)
                return time.monotonic() - began
            if self._driver is not told:
                told = self._driver
                told.stop()
            if time.monotonic() - began > _DRAIN_S:
                log = (self._work / "driver.log").read_text(errors="replace")[-4000:]
                raise SystemExit(f"the job does not end; the driver's log ends with:\n{log}")

    def _strike(self) -> None:
        """Kill a process, or let it stand still; what there is of it decides which."""
        assert self._driver is not None
        found: dict[str, Callable[[], list[int]]] = {
            "worker": lambda: sorted(self._cluster.processes("pyspark.daemon")),
            "taskmanager": self._cluster.task_managers,
            "executor": lambda: [pid for host in HOSTS for pid in self._cluster.executors(host)],
        }
        # A driver comes back slowest of all, and meanwhile there is little to kill.
        order = [kind for kind in KILLS for _ in range(1 if kind == "driver" else 3)]
        self._rng.shuffle(order)
        pauses = self._rng.random() < _PAUSE_SHARE
        for kind in order:
            if kind == "driver" and not pauses:
                self._driver.kill()
            elif pids := [self._driver.process.pid] if kind == "driver" else found[kind]():
                pid = self._rng.choice(pids)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGSTOP if pauses else signal.SIGKILL)
                if pauses:
                    threading.Timer(_LONGEST_PAUSE_S ** self._rng.random(), _wake, [pid]).start()
            else:
                continue
            (self.pauses if pauses else self.kills)[kind] += 1
            print(f"{'stopped for a while' if pauses else 'killed'}: {kind}", file=sys.stderr)
            return

    def _fail_requests(self, stop: threading.Event) -> None:
        """Keep one fault of each kind waiting for a request, now and then."""
        rng = random.Random(f"faults-{self._args.seed}")
        while not stop.wait(rng.uniform(0.0, 2 * self._args.fault_every)):
            self._server.faults[:] = waiting = [fault for fault in self._server.faults if fault.times > 0]
            kind = rng.choice(FAULTS)
            if any(fault.kind == kind for fault in waiting):
                continue  # else they would heap up while a driver starts, which no store does
            settings: dict[str, Any] = {"delay_s": rng.uniform(0.5, 4.0)} if kind == "slow" else {}
            self._server.fail(kind, method=rng.choice(["", "PUT", "GET"]), times=rng.randrange(1, 4), **settings)


def _wake(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)


@contextlib.contextmanager
def _cluster(work: Path, server: S3Server) -> Iterator[StandaloneCluster]:
    directory = work / "cluster"
    directory.mkdir()
    # Executors that are killed are no reason to give the application up.
    cluster = StandaloneCluster(directory, f"{QUICK} -Dspark.deploy.maxExecutorRetries=-1")
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.close()


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Run the job once and return its figures; ``--work`` keeps logs and files."""
    work = Path(tempfile.mkdtemp(prefix="dstl-bench-chaos-", dir=args.work))
    done = False
    try:
        with S3Server() as server, server.credentials():
            server.make_bucket(_BUCKET)
            with _cluster(work, server) as cluster:
                chaos = Chaos(args, work, cluster, server)
                try:
                    figures = chaos.run()
                finally:
                    if chaos._driver is not None:
                        chaos._driver.kill()
        done = True
        return figures
    finally:
        if done and not args.work:
            shutil.rmtree(work, ignore_errors=True)
        else:
            print(f"kept: {work}", file=sys.stderr)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench chaos", description=__doc__)
    parser.add_argument("--job", choices=JOBS, default=JOBS[0])
    parser.add_argument(
        "--commit", choices=("now", "with-next"), default="now", help="when a batch waits for its record"
    )
    parser.add_argument("--minutes", type=float, default=20.0, help="of faults and kills (default 20)")
    parser.add_argument("--kill-every", type=float, default=10.0, metavar="S", help="seconds (default 10)")
    parser.add_argument("--fault-every", type=float, default=0.5, metavar="S", help="mean seconds between store faults")
    parser.add_argument("--rate", type=float, help="rows per second that come (default 5000, of lists 500)")
    parser.add_argument("--file-events", type=int, help="rows in one file (default: a second's)")
    parser.add_argument("--addresses", type=int, default=20_000)
    parser.add_argument("--error-rate", type=float, default=0.001, help="share of planted invalid events")
    parser.add_argument("--work", help="directory for logs and files, which stay there (default: TMPDIR, and gone)")
    parser.add_argument("--seed", type=int, default=None, help="decides events, kills and faults; printed")
    parser.add_argument("--verbose", action="store_true")
    add_json(parser)
    args = parser.parse_args(argv)
    if args.seed is None:
        args.seed = random.SystemRandom().randrange(1 << 32)
    args.rate = args.rate or (500.0 if args.job == "lists" else 5000.0)
    args.file_events = args.file_events or int(args.rate)
    figures = run(args)
    print_figures(figures, as_json=args.json)
    return 1 if any(figures.get(name) for name in WRONG) else 0
