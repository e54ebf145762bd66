"""Progress of a restore: a pure tracker, and listeners that show it."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import TracebackType

from dstl.metrics import Recorder

_log = logging.getLogger(__name__)
_LINE_EVERY_S = 5.0  # often enough to see that it goes on, and 720 lines in an hour
_WINDOW_S = 10.0  # long enough for an even rate, and short enough to show a store that turned slow


@dataclass(frozen=True, slots=True)
class RestoreStatus:
    """The progress of a restore at one moment.

    Attributes:
        done: Bytes of base files and segments that were read and applied.
        total: Bytes to read; grows when a damaged base makes more log necessary.
        seconds: Since it began.
        rate: Bytes per second over the last ten seconds or so; 0 before anything was read.
        eta_s: Seconds to go at this rate; None while that is not known.
        operators: Done and total by operator.
        finished: True for the last one.
    """

    done: int
    total: int
    seconds: float
    rate: float
    eta_s: float | None
    operators: Mapping[str, tuple[int, int]]
    finished: bool = False


def combine(statuses: Iterable[RestoreStatus]) -> RestoreStatus:
    """Return the status of several restores that run at the same time: it ends with the last of them."""
    each = list(statuses)
    operators: dict[str, tuple[int, int]] = {}
    for status in each:
        for name, (done, total) in status.operators.items():
            before = operators.get(name, (0, 0))
            operators[name] = (before[0] + done, before[1] + total)
    running = [status.eta_s for status in each if not status.finished]
    return RestoreStatus(
        sum(status.done for status in each),
        sum(status.total for status in each),
        max((status.seconds for status in each), default=0.0),
        sum(status.rate for status in each),
        None if None in running else max((eta for eta in running if eta is not None), default=0.0),
        operators,
        not running,
    )


ProgressListener = Callable[[RestoreStatus], None]
"""Is told of a restore's progress, on its event loop; must not block. What it raises ends the restore."""


class RestoreProgress:
    """Counts bytes of a restore. Pure: the caller says what time it is. Not thread-safe.

    Args:
        totals: Bytes to read by operator.
        now: Seconds on any clock that goes forward.
    """

    def __init__(self, totals: Mapping[str, int], now: float) -> None:
        self._done = dict.fromkeys(totals, 0)
        self._totals = dict(totals)
        self._began = now
        self._recent: deque[tuple[float, int]] = deque([(now, 0)])

    def add(self, operator: str, nbytes: int, now: float) -> None:
        """Record bytes of an operator that were applied."""
        self._done[operator] = self._done.get(operator, 0) + nbytes
        self._totals[operator] = max(self._totals.get(operator, 0), self._done[operator])
        self._recent.append((now, sum(self._done.values())))
        while len(self._recent) > 2 and self._recent[1][0] <= now - _WINDOW_S:
            self._recent.popleft()

    def more(self, operator: str, nbytes: int) -> None:
        """Record more bytes that have to be read."""
        self._totals[operator] = self._totals.get(operator, 0) + nbytes

    def status(self, now: float, *, finished: bool = False) -> RestoreStatus:
        """Return how far it has come."""
        if finished:
            # Where a base was damaged, an older one of another size was read, or none.
            self._totals = {name: self._done.get(name, 0) for name in self._totals}
        done, total = sum(self._done.values()), sum(self._totals.values())
        since, before = self._recent[0]
        rate = (done - before) / (now - since) if now > since else 0.0
        eta = (total - done) / rate if rate > 0 else (0.0 if done >= total else None)
        operators = {name: (self._done.get(name, 0), size) for name, size in self._totals.items()}
        return RestoreStatus(done, total, now - self._began, rate, eta, operators, finished)


def describe(status: RestoreStatus) -> str:
    """Return a status as one line for people."""
    share = 100.0 * status.done / status.total if status.total else 100.0
    eta = "" if status.eta_s is None or status.finished else f", {status.eta_s:.0f} s to go"
    of = ", ".join(
        f"{name} {100.0 * done / size if size else 100.0:.0f} %"
        for name, (done, size) in sorted(status.operators.items())
    )
    return (
        f"{status.done / 1e6:.1f} of {status.total / 1e6:.1f} MB ({share:.0f} %) in {status.seconds:.1f} s, "
        f"{status.rate / 1e6:.1f} MB/s{eta}" + (f" ({of})" if len(status.operators) > 1 else "")
    )


class LogLine:
    """Writes a log line every few seconds, and one at the end of a restore that took that long."""

    def __init__(self) -> None:
        self._next = _LINE_EVERY_S

    def __call__(self, status: RestoreStatus, /) -> None:
        """Take a status."""
        if status.seconds < self._next and not (status.finished and self._next > _LINE_EVERY_S):
            return
        self._next = status.seconds + _LINE_EVERY_S
        _log.info("%s: %s", "restored" if status.finished else "restoring", describe(status))


def record_progress(recorder: Recorder, status: RestoreStatus) -> None:
    """Keep a status as gauges: ``restoredBytes``, ``bytesToRestore``, ``restoreBytesPerSecond``, ``restoreEtaSeconds``
    (-1 while it is not known).
    """
    recorder.gauge("restoredBytes", status.done)
    recorder.gauge("bytesToRestore", status.total)
    recorder.gauge("restoreBytesPerSecond", status.rate)
    recorder.gauge("restoreEtaSeconds", -1.0 if status.eta_s is None else status.eta_s)


class ProgressBar:
    """A bar on a terminal, by ``rich``; a context manager. For ``StateBackend.add_progress_listener``."""

    def __init__(self) -> None:
        from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

        self._progress = Progress(
            "{task.description}", BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn()
        )
        self._tasks: dict[str, object] = {}

    def __enter__(self) -> ProgressBar:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def __call__(self, status: RestoreStatus, /) -> None:
        """Take a status."""
        for name, (done, total) in status.operators.items():
            if name not in self._tasks:
                self._tasks[name] = self._progress.add_task(name, total=total)
            self._progress.update(self._tasks[name], completed=done, total=total)  # type: ignore[arg-type]
