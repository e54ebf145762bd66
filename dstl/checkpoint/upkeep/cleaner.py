"""The cleaner: deletes what crashes, losing attempts and aborted batches left (DESIGN 7.6).

Run after recovery, periodically, and as ``dstl gc``. It only reads and deletes what the plan proves to be dead, so it
runs beside checkpoints and blocks none; what appears while it runs is simply not in its list.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass

from dstl.checkpoint.manifest.reader import ManifestReader, ManifestScan, no_location
from dstl.checkpoint.upkeep.cleaning_plan import CleaningPlan, Deletion, plan_cleaning
from dstl.crash_points import reach
from dstl.errors import CorruptData, DstlError, Fenced
from dstl.options import CheckpointOptions
from dstl.runtime import Runtime, call_in_thread, end_tasks
from dstl.store.base import ObjectStore

_log = logging.getLogger(__name__)
_TOGETHER = 250  # a quarter of S3's most, so that progress is seen and a pass ends soon


@dataclass(frozen=True, slots=True)
class CleanerReport:
    """The result of a pass, or of a dry run.

    Attributes:
        query_id: The query that the location belongs to.
        dry_run: True where nothing was deleted.
        now: Unix seconds by the store's clock.
        objects: Objects in the location.
        bytes: Their bytes.
        plan: What was to be deleted and why, and what stays and why.
        deleted: How many of the plan's deletions were made.
    """

    query_id: str
    dry_run: bool
    now: float
    objects: int
    bytes: int
    plan: CleaningPlan
    deleted: int

    @property
    def orphan_bytes(self) -> int:
        """Bytes of what was to be deleted."""
        return sum(each.info.size for each in self.plan.deletions)


@dataclass(frozen=True, slots=True)
class LiveDriver:
    """The query's driver as a pass asks it, once its list of the location is complete.

    Attributes:
        epoch: Of the driver who cleans: it must still lead. 0: there is none.
        writer_ids: The writers of all TaskManagers that are connected, and of those whose segments a checkpoint that is
            being committed may name. None: unknown (the command line beside a running query), so what any
            writer may still hand out stays.
        held: The names that the query's own savepoints read. None: unknown, so what a savepoint that is
            being written in this location may read stays.
    """

    epoch: Callable[[], int] = lambda: 0
    writer_ids: Callable[[], Awaitable[Collection[str]]] | None = None
    held: Callable[[], Collection[str]] | None = None


async def clean(
    store: ObjectStore,
    log: ManifestReader,
    *,
    grace_s: float,
    driver: LiveDriver = LiveDriver(),
    dry_run: bool = True,
    max_deletions: int = 10_000,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> CleanerReport:
    """Find the orphans of a location and delete them, the oldest first.

    May be cancelled or die at any point: the next pass finds the rest. "Already gone" is success.

    A dry run writes nothing, the probe that asks for the store's time included: it goes by this host's clock, or by the
    newest object's where that is later.

    Args:
        store: The location.
        log: A reader of it, whose runtime is the source of the probe's name, and a dry run's clock.
        grace_s: Seconds that every object is left alone. It must exceed the longest that a commit may take.
        driver: Says what is in use; by default there is none to be asked.
        dry_run: Only say what would be deleted.
        max_deletions: Bound of this pass; the rest is left to the next.
        on_progress: Told (done, in all) of the deletions.

    Raises:
        Fenced: Another driver has taken the location over: nothing was deleted.
        Invalid: No query has used this location.
        CorruptData: A record is damaged, so it is unknown what is referenced: nothing was deleted.
        Unavailable: The store did not answer; part of the plan may be done.
    """
    runtime, epoch = log.runtime, driver.epoch
    # Before anything is written, or listed whole: it may be a typo, or another's directory.
    if not epoch() and not await log.tail():
        raise no_location(store.location, "it holds no manifest")
    now = None if dry_run else await _store_time(store, runtime)
    listing = [info async for info in store.list()]
    scan = await log.scan()
    _check(store, scan, epoch())
    live = None if driver.writer_ids is None else await driver.writer_ids()
    names = None if driver.held is None else driver.held()
    if now is None:
        now = max(runtime.clock.wall(), max((info.modified for info in listing), default=0.0))
    # Off the loop: the plan of a million objects would hold up a checkpoint.
    plan = await call_in_thread(
        plan_cleaning, listing, scan, live, names, now=now, grace_s=grace_s, max_deletions=max_deletions
    )
    deleted = 0 if dry_run else await _delete(store, plan.deletions, on_progress)
    return CleanerReport(scan.query_id, dry_run, now, len(listing), sum(info.size for info in listing), plan, deleted)


async def _store_time(store: ObjectStore, runtime: Runtime) -> float:
    """Return the store's time, from a fresh object; its clock and ours may differ by hours."""
    name = f"probe/{runtime.new_id()}"
    await store.put(name, b"", if_absent=True)  # empty: it fits on a full disk, which needs cleaning most
    try:
        return (await store.head(name)).modified
    finally:
        # An error here would take the place of a cancellation; a probe that stays is found by a later pass.
        with contextlib.suppress(DstlError):
            await store.delete([name])


def _check(store: ObjectStore, scan: ManifestScan, epoch: int) -> None:
    for _, error in sorted(scan.damaged.items(), reverse=True):
        raise CorruptData(f"nothing is deleted, for it is unknown what is needed: {error}") from error
    if not scan.records:
        raise no_location(store.location, "it holds no manifest")
    if epoch and scan.epoch != epoch:
        raise Fenced(f"{store.location} was taken over by epoch {scan.epoch}; this driver ({epoch}) deletes nothing")


async def _delete(store: ObjectStore, deletions: tuple[Deletion, ...], on_progress: Callable[[int, int], None]) -> int:
    done = 0
    while done < len(deletions):
        some = deletions[done : done + _TOGETHER]
        try:
            await store.delete([each.info.name for each in some])
        except DstlError:
            _log.warning("the cleaner stopped after %d of %d deletions in %s", done, len(deletions), store.location)
            raise
        reach("C12")
        done += len(some)
        on_progress(done, len(deletions))
    if done:
        _log.info("the cleaner deleted %d objects of %s", done, store.location)
    return done


class PeriodicCleaner:
    """Runs the cleaner in the background. One event loop.

    Args:
        store: The location; all that is read or written here goes through it, and is no checkpoint's request.
        runtime: Clock and ids.
        driver: This one, asked by every pass: one that has been fenced deletes nothing.
        options: Interval and grace.
    """

    def __init__(self, store: ObjectStore, runtime: Runtime, driver: LiveDriver, options: CheckpointOptions) -> None:
        self._store = store
        self._reader = ManifestReader(store, runtime)
        self._runtime = runtime
        self._driver = driver
        self._options = options
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin with a pass now; called again, nothing happens while the task runs. It ends where it is fenced."""
        if self._options.clean_interval_s > 0 and (self._task is None or self._task.done()):
            self._task = asyncio.get_running_loop().create_task(self._run())

    async def close(self) -> None:
        """Stop; a pass may be cut off anywhere. Idempotent."""
        task, self._task = self._task, None
        if task is not None:
            await end_tasks([task])

    async def _run(self) -> None:
        while True:
            try:
                grace_s = self._options.clean_grace_s
                report = await clean(self._store, self._reader, grace_s=grace_s, driver=self._driver, dry_run=False)
                _log.info(
                    "the cleaner has passed: %d of %d objects deleted, of %d bytes",
                    report.deleted,
                    report.objects,
                    report.orphan_bytes,
                )
            except Fenced as error:
                # For good, unless this driver begins another run.
                _log.warning("the cleaner ends: %s", error)
                return
            except DstlError as error:
                task = asyncio.current_task()
                if task is not None and task.cancelling():
                    # The pass was cut off and ended with an error of its own: close() waits for us.
                    return
                _log.warning("the cleaner was stopped, and will try again: %s", error)
            await self._runtime.clock.sleep(self._options.clean_interval_s)
