"""Spark's part for a query of real processes: it runs tasks, tries them again, starts the query again, keeps output.

A process that has stopped at a crash point is taken for lost, as Spark and an operator would; a new one takes its
place, and the old one goes on when the query is two batches ahead.
"""

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dstl.crash_points import VARIABLE
from worlds.crashing_processes import OPERATORS, keys_of

PATIENCE_S = 90.0
TRIES = 4
"""Of a task, before the query starts again."""
AHEAD = 2
"""Batches that the query is ahead when what was stopped goes on."""


class Gone(Exception):
    """The process has ended."""


class Stopped(Exception):
    """The process that the crash point names has stopped."""


class Process:
    """A process that answers orders."""

    def __init__(self, kind: str, config: dict[str, Any], environment: dict[str, str]) -> None:
        path = Path(__file__).with_name("crashing_processes.py")
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", str(path), kind, json.dumps(config)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        self._answers: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.pid = self._process.pid
        self.busy = False
        """An order was given, and not answered."""

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._answers.put(json.loads(line))
        self._answers.put(None)

    def order(self, **order: Any) -> None:
        self.busy = True
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(order) + "\n")
            self._process.stdin.flush()

    def answer(self, look: Callable[[], None]) -> dict[str, Any]:
        """Wait for an answer; ``look`` is called meanwhile, and may raise."""
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            with contextlib.suppress(queue.Empty):
                found = self._answers.get(timeout=0.05)
                if found is None:
                    self._answers.put(None)
                    raise Gone
                self.busy = False
                return found
            look()
        raise AssertionError(f"no answer within {PATIENCE_S:g} s")

    def end(self) -> None:
        for pipe in (self._process.stdin,):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(5)
        self.kill()

    def kill(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        self._reader.join()
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.stdout.close()


@dataclass
class Application:
    """A driver and its worker.

    Attributes:
        run: The last run that it has had tasks of.
        batch: The last batch.
    """

    driver: Process
    served: dict[str, Any]
    worker: Process | None = None
    run: str = ""
    batch: int = 0


@dataclass
class Figures:
    """What a query has lived through."""

    restarts: int = 0
    applications: int = 0
    failures: list[str] = field(default_factory=list)
    late: list[str] = field(default_factory=list)
    """Answers of what was stopped, once it went on."""


class Query:
    """A query with one crash point, from its first batch to its end; ``files`` say when a batch waits."""

    def __init__(self, directory: Path, point: str, way: str, hit: int, files: Mapping[str, str]) -> None:
        self.location = str(directory / "state")
        self._files = files
        self.mark = directory / "mark"
        self.figures = Figures()
        self.output: dict[int, dict[str, str]] = {}
        self._environment = {**os.environ, VARIABLE: f"{point}:{hit}:{way}:{self.mark}", "DSTL_LOG_LEVEL": "ERROR"}
        self._environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
        self._stops = way == "stop"
        self._application: Application | None = None
        self.task_managers = 2
        self._run = self._attempt = 0
        self._struck = False
        self._zombies: list[tuple[int, Application | Process]] = []
        self._abandoned: list[Application | Process] = []
        self._batches = 0

    @property
    def struck(self) -> int | None:
        """The id of the process that has reached the point."""
        with contextlib.suppress(FileNotFoundError, ValueError):
            return int(self.mark.read_text())
        return None

    # -- the query

    def run_batch(self, batch: int) -> None:
        """Run a batch until all its tasks have ended well, whatever that takes."""
        # It may be committed already, by a savepoint that had to wait for it.
        output = self.output.get(batch, {})
        for _ in range(12):
            try:
                following = self._order(do="plan", batch=batch)["next"]
                if following == batch - 1 and self._files:
                    # Spark had taken it for committed, and its record was lost.
                    self.run_batch(following)
                    continue
                assert following in (batch, batch + 1), following
                if following == batch:
                    output = {}
                    for uid, parallelism in OPERATORS.items():
                        for slot in range(parallelism):
                            for key, seen in self._task(uid, slot, batch).items():
                                output[f"{uid}/{key}"] = seen
                    self._order(do="commit", batch=batch)
            except _Failed as failed:
                self.figures.failures.append(str(failed))
                self.figures.restarts += 1
                self._run += 1
                continue
            self.output[batch] = output
            self._batches = batch + 1
            self._let_go_on()
            return
        raise AssertionError(f"batch {batch} does not end: {self.figures.failures}")

    def savepoint(self, name: str) -> None:
        """Make a savepoint, or find out that it is there; again where its maker has died."""
        for number in range(4):
            application = self._started()
            application.driver.order(do="savepoint", name=f"{name}-{number}")
            try:
                done = application.driver.answer(self._look)
            except (Gone, Stopped):
                self._abandon(application)
                self.run_batch(self._batches)
                continue
            assert done["ok"] or done["error"] == "MissingState", done
            if done["ok"]:
                return
            self.run_batch(self._batches)
        raise AssertionError("no savepoint was made")

    def restart(self, task_managers: int) -> None:
        """End the driver as a user would, and go on with another number of TaskManagers."""
        application = self._application
        self.task_managers = task_managers
        if application is None:
            return
        if application.worker is not None:
            application.worker.end()
            application.worker = None
        application.driver.order(do="close")
        try:
            application.driver.answer(self._look)
        except (Gone, Stopped):
            self._abandon(application)
        else:
            application.driver.end()
            self._application = None

    def close(self) -> None:
        """End everything that there is."""
        if self._stops and self._zombies:
            self._let_go_on(now=True)
        for each in [self._application, *self._abandoned, *(zombie for _, zombie in self._zombies)]:
            for process in _processes(each):
                process.kill()
        if self.struck is not None and self._stops:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.struck, signal.SIGKILL)

    # -- its parts

    def _order(self, **order: Any) -> dict[str, Any]:
        """Have the driver do something for the run of now, and return its answer."""
        application = self._started()
        application.driver.order(run=f"run-{self._run}", **order)
        try:
            done = application.driver.answer(self._look)
        except (Gone, Stopped) as lost:
            self._abandon(application)
            raise _Failed(f"{order['do']}: {type(lost).__name__}") from None
        if not done["ok"]:
            if not self._lives(application):
                self._abandon(application)
            raise _Failed(f"{order['do']}: {done['error']}: {done['why']}")
        return done

    def _task(self, uid: str, slot: int, batch: int) -> dict[str, str]:
        why = ""
        for _ in range(TRIES):
            application = self._started()
            worker = self._worker(application)
            self._attempt += 1
            application.run, application.batch = f"run-{self._run}", batch
            worker.order(
                run=application.run, operator=uid, slot=slot, batch=batch, stage=self._run, attempt=self._attempt
            )
            try:
                done = worker.answer(self._look)
            except Gone:
                if self.struck != worker.pid:
                    # It lives as long as it is asked, unless the point was its own.
                    raise AssertionError("a worker has died for no reason") from None
                self._struck = True
                worker.kill()
                application.worker = None
                why = "the worker died"
                continue
            except Stopped:
                if self.struck == worker.pid:
                    self._zombies.append((self._batches, worker))
                    application.worker = None
                else:
                    self._abandon(application)
                    raise _Failed("the driver or a TaskManager stopped") from None
                continue
            if done["ok"]:
                found: dict[str, str] = done["output"]
                return found
            why = f"{done['error']}: {done['why']}"
            if not self._lives(application):
                self._abandon(application)
                break
        raise _Failed(f"{uid} {slot}: {why}")

    def _lives(self, application: Application) -> bool:
        return application.driver._process.poll() is None

    def _look(self) -> None:
        """Raise where something has stopped at the point just now."""
        pid = self.struck
        if self._stops and not self._struck and pid is not None and _state_of(pid) == "T":
            self._struck = True
            raise Stopped

    def _started(self) -> Application:
        if self._application is not None and not self._lives(self._application):
            self._abandon(self._application)
        for _ in range(3):
            if self._application is not None:
                return self._application
            self._run += 1
            config = {"location": self.location, "task_managers": self.task_managers, "files": self._files}
            driver = Process("driver", config, self._environment)
            self.figures.applications += 1
            try:
                self._application = Application(driver, driver.answer(self._look))
            except (Gone, Stopped):
                self._abandon(Application(driver, {}))
        raise AssertionError("no driver starts")

    def _worker(self, application: Application) -> Process:
        for _ in range(3):
            if application.worker is not None:
                return application.worker
            worker = Process("worker", application.served, self._environment)
            try:
                worker.answer(lambda: None)
            except Gone:
                worker.kill()
                continue
            application.worker = worker
        raise AssertionError("no worker starts")

    def _abandon(self, application: Application) -> None:
        """Take an application for lost. One that has stopped is left as it is; a dead one's rest ends by itself."""
        if application is self._application:
            self._application = None
        if self._stops and self._struck and not self._zombies and self._lives(application):
            self._zombies.append((self._batches, application))
        else:
            self._abandoned.append(application)
            for process in _processes(application):
                process.kill()

    def _let_go_on(self, *, now: bool = False) -> None:
        """Continue what was stopped, once the query is ahead of it, and hear what it says."""
        if self.struck is not None and self._stops and not self._struck and _state_of(self.struck) == "T":
            # Nobody waited for it, so nobody has noticed.
            self._struck = True
            if self._application is not None:
                self._abandon(self._application)
        for since, zombie in list(self._zombies):
            if not now and self._batches < since + AHEAD:
                continue
            self._zombies.remove((since, zombie))
            assert self.struck is not None
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.struck, signal.SIGCONT)
            with contextlib.suppress(Gone):
                if isinstance(zombie, Application):
                    self._hear_driver(zombie)
                else:
                    self._hear(zombie)
            self._abandoned.append(zombie)

    def _hear(self, process: Process) -> None:
        """Hear what something that hung says now."""
        if process.busy:
            self.figures.late.append(_said(process.answer(lambda: None)))

    def _hear_driver(self, application: Application) -> None:
        """Let a driver go on that another has replaced: it must not get a batch through."""
        driver, worker = application.driver, application.worker
        if worker is not None:
            self._hear(worker)
        self._hear(driver)
        for batch in (application.batch, application.batch + 1):
            for uid, slot in ((uid, slot) for uid, many in OPERATORS.items() for slot in range(many)):
                if worker is not None:
                    self._attempt += 1
                    order = {"run": application.run, "stage": 99, "slot": slot, "operator": uid, "batch": batch}
                    worker.order(**order, attempt=self._attempt)
                    self._hear(worker)
            driver.order(do="commit", run=application.run, batch=batch)
            self._hear(driver)
        if self.figures.late[-1] == "ok" and self._files:
            # Spark is told of it before its record is there, and finds it lost with the batch behind it.
            for what in ("plan", "commit"):
                driver.order(do=what, run=application.run, batch=application.batch + 2)
                self._hear(driver)
        assert self.figures.late[-1] != "ok", f"a driver that was replaced has committed behind it: {self.figures.late}"


class _Failed(Exception):
    """The query has failed, and starts again."""


def _said(answer: dict[str, Any]) -> str:
    return "ok" if answer["ok"] else str(answer["error"])


def _processes(each: Application | Process | None) -> list[Process]:
    if each is None:
        return []
    if isinstance(each, Process):
        return [each]
    return [each.driver, *([each.worker] if each.worker is not None else [])]


def _state_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def expected(batch: int) -> dict[str, str]:
    """Return what every operator must yield in a batch: for each key, all batches that it had rows in."""
    return {
        f"{uid}/{key}": ",".join(str(b) for b in range(batch + 1) if key in keys_of(b))
        for uid in OPERATORS
        for key in keys_of(batch)
    }
