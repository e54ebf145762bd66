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
from functools import partial

from dstl.checkpoint.manifest.reader import ManifestReader
from dstl.checkpoint.manifest.scan import ManifestScan
from dstl.checkpoint.upkeep.cleaning_plan import CleaningPlan, Deletion, plan_cleaning, subsumed_candidates
from dstl.crash_points import reach
from dstl.errors import CorruptData, DstlError, Fenced, Invalid, ObjectNotFound
from dstl.runtime import Runtime
from dstl.store.base import ObjectStore

__all__ = ["CleanerReport", "clean"]

_log = logging.getLogger(__name__)
_TOGETHER = 250
_READ_TOGETHER = 16

LiveWriterIds = Callable[[], Awaitable[Collection[str]]]
Held = Callable[[], Collection[str]]


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


async def clean(
    store: ObjectStore,
    runtime: Runtime,
    log: ManifestReader,
    *,
    grace_s: float,
    epoch: Callable[[], int] = lambda: 0,
    dry_run: bool = True,
    live_writer_ids: LiveWriterIds | None = None,
    held: Held | None = None,
    max_deletions: int = 10_000,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> CleanerReport:
    """Find the orphans of a location and delete them, the oldest first.

    May be cancelled or die at any point: the next pass finds the rest. "Already gone" is success.

    A dry run writes nothing, the probe that asks for the store's time included: it goes by this host's clock, or by the
    newest object's where that is later.

    Args:
        store: The location.
        runtime: Source of the probe's name; a dry run's clock.
        log: A reader of it.
        grace_s: Seconds that every object is left alone. It must exceed the longest that a commit may take.
        epoch: Of the driver who cleans, asked after the list is complete: it must still lead. 0: there is none.
        dry_run: Only say what would be deleted.
        live_writer_ids: Asked once, after the list is complete: the writers of all TaskManagers that are connected,
            and of those whose segments a checkpoint that is being committed may name. None: nobody can be asked (the
            command line beside a running query), so what any writer may still hand out stays.
        held: Asked once, after the list is complete: the names that the query's own savepoints read. None: nobody can
            be asked, so what a savepoint that is being written in this location may read stays.
        max_deletions: Bound of this pass; the rest is left to the next.
        on_progress: Told (done, in all) of the deletions.

    Raises:
        Fenced: Another driver has taken the location over: nothing was deleted.
        Invalid: No query has used this location.
        CorruptData: A record is damaged, so it is unknown what is referenced: nothing was deleted.
        Unavailable: The store did not answer; part of the plan may be done.
    """
    # Before anything is written, or listed whole: it may be a typo, or somebody else's directory.
    if not await log.tail():
        raise _no_location(store)
    now = None if dry_run else await _store_time(store, runtime)
    listing = [info async for info in store.list()]
    scan = await log.scan()
    _check(store, scan, epoch())
    live = None if live_writer_ids is None else await live_writer_ids()
    names = None if held is None else held()
    if now is None:
        now = max(runtime.clock.wall(), max((info.modified for info in listing), default=0.0))
    subsumed = await _find_subsumed(log, list(subsumed_candidates(scan, now, grace_s)))
    # Off the loop: the plan of a million objects would hold up a checkpoint.
    plan = await asyncio.get_running_loop().run_in_executor(
        None,
        partial(
            plan_cleaning,
            listing,
            scan,
            subsumed,
            live,
            names,
            now=now,
            grace_s=grace_s,
            max_deletions=max_deletions,
        ),
    )
    deleted = 0 if dry_run else await _delete(store, plan.deletions, on_progress)
    return CleanerReport(scan.query_id, dry_run, now, len(listing), sum(info.size for info in listing), plan, deleted)


async def _store_time(store: ObjectStore, runtime: Runtime) -> float:
    """Return the store's time, from a fresh object; its clock and ours may differ by hours."""
    name = f"probe/{runtime.new_id()}"
    await store.put(name, name.encode(), if_absent=True)
    try:
        return (await store.head(name)).modified
    finally:
        # An error here would take the place of a cancellation; a probe that stays is found by a later pass.
        with contextlib.suppress(DstlError):
            await store.delete([name])


def _check(store: ObjectStore, scan: ManifestScan, epoch: int) -> None:
    for _, error in sorted(scan.damaged.items(), reverse=True):
        raise CorruptData(f"nothing is deleted, for it is unknown what is needed: {error}") from error
    if not scan.query_id:
        raise _no_location(store)
    if epoch and scan.epoch != epoch:
        raise Fenced(f"{store.location} was taken over by epoch {scan.epoch}; this driver ({epoch}) deletes nothing")


def _no_location(store: ObjectStore) -> Invalid:
    return Invalid(f"{store.location} is not a location of DSTL: no query has written a manifest there")


async def _find_subsumed(log: ManifestReader, candidates: list[int]) -> set[int]:
    """Return those that are records of checkpoints or files; what is gone, or cannot be read, is none."""

    async def says_nothing_more(sequence: int) -> bool:
        try:
            record = await log.read(sequence)
            return record.checkpoint is not None or record.files is not None
        except ObjectNotFound:
            return False
        except (CorruptData, Invalid) as error:
            # It may be a fence: without knowing, it stays.
            _log.warning("a record below the cleanup boundary stays: %s", error)
            return False

    found: set[int] = set()
    for at in range(0, len(candidates), _READ_TOGETHER):
        some = candidates[at : at + _READ_TOGETHER]
        answers = await asyncio.gather(*map(says_nothing_more, some))
        found.update(sequence for sequence, answer in zip(some, answers, strict=True) if answer)
    return found


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
