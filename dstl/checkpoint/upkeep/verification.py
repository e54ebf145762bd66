"""Verification of a location: every byte of its manifests, segments and base files is read.

Only reads, and may run beside the query: what the query deletes meanwhile, because a newer checkpoint has subsumed it,
is no damage.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

from dstl.changelog.object_names import parse_segment_name
from dstl.checkpoint.manifest.format import manifest_name, manifest_sequence
from dstl.checkpoint.manifest.reader import ManifestReader, ManifestScan
from dstl.checkpoint.savepoint.creation import OnProgress
from dstl.checkpoint.savepoint.format import Savepoint, SavepointObjects, check_savepoint_name
from dstl.checkpoint.savepoint.restore import savepoint_as_checkpoint
from dstl.checkpoint.upkeep.object_checks import (
    SegmentUse,
    check_base,
    check_segment,
    check_size,
    check_stray_segment,
    check_table_file,
)
from dstl.errors import CorruptData, DstlError, Invalid, MissingState, ObjectNotFound
from dstl.runtime import Runtime, all_of
from dstl.store.base import ObjectInfo, ObjectStore
from dstl.store.retry_policy import RetryPolicy
from handles.checkpoint import CompletedCheckpoint, referenced_objects
from handles.materialized_handle import MaterializedStateHandle
from handles.segment_handle import SegmentHandle, SequenceNumberRange

_TOGETHER = 8  # objects of up to 64 MiB in memory at once


@dataclass(frozen=True, slots=True)
class Problem:
    """One object that is not what it should be.

    Attributes:
        object: Its name.
        checkpoints: The retained checkpoints that need it; empty where none does.
        kind: ``damaged``, ``missing`` or ``unsupported`` (a newer version wrote it).
        detail: What is wrong.
        next_step: What the operator can do.
    """

    object: str
    checkpoints: tuple[int, ...]
    kind: str
    detail: str
    next_step: str


@dataclass(frozen=True, slots=True)
class LocationVerification:
    """The result of reading a location whole.

    Attributes:
        query_id: The query that the location belongs to.
        checkpoints: The retained checkpoints that were checked, oldest first.
        objects: How many objects were read.
        bytes: How many bytes.
        strays: Objects with names of ours that no retained checkpoint needs: the cleaner's.
        others: Objects with other names: not looked at.
        problems: Empty where all is well.
    """

    query_id: str
    checkpoints: tuple[CompletedCheckpoint, ...]
    objects: int
    bytes: int
    strays: int
    others: int
    problems: tuple[Problem, ...]


async def verify_location(
    store: ObjectStore,
    runtime: Runtime,
    *,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> LocationVerification:
    """Read and decode every manifest, segment and base file of a location.

    Checked of each object that a retained checkpoint names: that it is there, its size and CRC-32C, the CRC-32C and
    the contents of every block, that it holds the change sets that the manifest says, and of their logs no key groups
    that a restore would not look for there. Of other records and segments: that they can be read.

    Args:
        store: The location.
        runtime: Clock and jitter for repeated reads.
        on_progress: Told (done, in all), in bytes.

    Raises:
        Invalid: No query has used this location.
        Unavailable: The store did not answer several times in a row.
    """
    log = ManifestReader(store, runtime)
    listed = {info.name: info async for info in store.list()}
    scan = await log.scan_used()
    needed_by = _needed_by(scan.retained) | {manifest_name(sequence): (sequence,) for sequence in scan.damaged}
    strays = [name for name in listed if name not in needed_by and _is_ours(name, scan.query_id)]
    checks = list(_checks(store, log, scan, listed, strays))
    problems = [*_missing_records(scan), *await _run(checks, needed_by, runtime, on_progress)]
    if problems:
        problems = await _confirm(problems, log)
    known = {*needed_by, *strays, *map(manifest_name, _records(scan, listed))}
    return LocationVerification(
        scan.query_id,
        tuple(scan.retained),
        len({check.name for check in checks}),
        sum(check.size for check in checks),
        len(strays),
        sum(name not in known for name in listed),
        tuple(sorted(problems, key=lambda each: (each.object, each.detail))),
    )


@dataclass(frozen=True, slots=True)
class _Check:
    name: str
    size: int
    work: Callable[[], Awaitable[object]]


def _checks(
    store: ObjectStore,
    log: ManifestReader,
    scan: ManifestScan,
    listed: Mapping[str, ObjectInfo],
    strays: Collection[str],
) -> Iterator[_Check]:
    """Yield one check for each distinct claim about an object; several checkpoints make the same."""
    for sequence, info in _records(scan, listed).items():
        yield _Check(manifest_name(sequence), info.size, partial(_check_record, log, scan, sequence))
    uses: dict[SegmentHandle, dict[SegmentUse, None]] = defaultdict(dict)
    bases: dict[MaterializedStateHandle, None] = {}
    for checkpoint in scan.retained:
        for entry in checkpoint.segments:
            for at, from_sqn, to_sqn in entry.ranges:
                of = checkpoint.logs[at]
                groups = entry.key_groups.intersect(of.key_groups) or of.key_groups
                uses[entry.handle][SegmentUse(of.log_id, SequenceNumberRange(from_sqn, to_sqn), groups)] = None
        bases.update(dict.fromkeys(checkpoint.materialized))
    for handle, of_segment in uses.items():
        whole = listed.get(handle.name) if handle.offset == 0 else None
        check = partial(_check_stored, whole, handle.size, partial(check_segment, store, handle, tuple(of_segment)))
        yield _Check(handle.name, handle.size, check)
    for base in bases:
        check = partial(_check_stored, listed.get(base.name), base.size, partial(check_base, store, base))
        yield _Check(base.name, base.size, check)
    for file in {file: None for base in bases for file in base.files}:
        check = partial(_check_stored, listed.get(file.name), file.size, partial(check_table_file, store, file))
        yield _Check(file.name, file.size, check)
    for name in strays:
        if name.endswith(".seg"):
            size = listed[name].size
            yield _Check(name, size, partial(check_stray_segment, store, name, size))


def _records(scan: ManifestScan, listed: Mapping[str, ObjectInfo]) -> dict[int, ObjectInfo]:
    """Return the log's records: also those below the cleanup boundary, which a scan leaves out."""
    below = {manifest_sequence(name): info for name, info in listed.items()}
    return {number: info for number, info in below.items() if number} | dict(scan.listed)


async def _check_record(log: ManifestReader, scan: ManifestScan, sequence: int) -> None:
    if sequence in scan.damaged:
        raise scan.damaged[sequence]
    await log.read(sequence)


async def _check_stored(info: ObjectInfo | None, size: int, check: Callable[[], Awaitable[object]]) -> None:
    check_size(info, size)
    await check()


async def _run(
    checks: Collection[_Check],
    needed_by: Mapping[str, tuple[int, ...]],
    runtime: Runtime,
    on_progress: Callable[[int, int], None],
) -> list[Problem]:
    problems: list[Problem] = []
    total, done = sum(check.size for check in checks), 0
    known = {checkpoint for each in needed_by.values() for checkpoint in each}
    turn = asyncio.Semaphore(_TOGETHER)

    async def run(check: _Check) -> None:
        nonlocal done
        async with turn:
            try:
                await RetryPolicy(runtime).read(check.work)
            except (CorruptData, Invalid, MissingState) as error:
                checkpoints = needed_by.get(check.name, ())
                problem = _problem(check.name, checkpoints, error, bool(known.difference(checkpoints)))
                if problem is not None:
                    problems.append(problem)
        done += check.size
        on_progress(done, total)

    await all_of(map(run, checks))
    return problems


def _problem(name: str, checkpoints: tuple[int, ...], error: Exception, has_others: bool) -> Problem | None:
    if isinstance(error, ObjectNotFound):
        if not checkpoints:
            return None
        kind, detail = "missing", "it is not there"
    else:
        kind, detail = ("unsupported" if isinstance(error, Invalid) else "damaged"), str(error)
    if kind == "unsupported":
        step = "upgrade DSTL here"
    elif checkpoints:
        numbers = ", ".join(map(str, checkpoints))
        step = f"restore {name} from a replica, or start from a savepoint"
        if has_others:
            step += (
                f' or from a checkpoint other than {numbers} (StateBackend(..., restore="previous") takes the newest '
                "that can be)"
            )
    else:
        step = f"no retained checkpoint needs it: restore {name} from a replica, or leave it"
    return Problem(name, checkpoints, kind, detail, step)


def _missing_records(scan: ManifestScan) -> Iterator[Problem]:
    """Yield the records that should be there, by what the others say, and are not."""
    expected: dict[int, list[int]] = {scan.boundary: []}
    for checkpoint in scan.retained:
        if checkpoint.parent is not None:
            expected.setdefault(checkpoint.parent, []).append(checkpoint.checkpoint_id)
    for sequence, children in expected.items():
        if sequence and sequence >= scan.boundary > 0 and sequence not in scan.listed:
            after = f"; checkpoint {children[0]} was built on it" if children else ""
            yield Problem(
                manifest_name(sequence),
                (sequence, *children),
                "missing",
                f"the record of checkpoint {sequence} is not there{after}",
                f"restore it from a replica; checkpoint {sequence} cannot be chosen without it, later ones can",
            )
    for sequence, error in scan.damaged.items():
        if sequence not in scan.listed and sequence not in expected:
            step = "restore it from a replica, or start from a savepoint"
            yield Problem(manifest_name(sequence), (sequence,), "missing", str(error), step)


async def _confirm(problems: list[Problem], log: ManifestReader) -> list[Problem]:
    """Leave out what a running query has subsumed and deleted while it was being read."""
    scan = await log.scan()
    current = {c.checkpoint_id for c in scan.retained} | scan.damaged.keys()
    return [p for p in problems if p.kind != "missing" or current & set(p.checkpoints)]


def _needed_by(checkpoints: Collection[CompletedCheckpoint]) -> dict[str, tuple[int, ...]]:
    needed: dict[str, tuple[int, ...]] = {}
    for checkpoint in checkpoints:
        for name in {*referenced_objects(checkpoint), manifest_name(checkpoint.checkpoint_id)}:
            needed[name] = (*needed.get(name, ()), checkpoint.checkpoint_id)
    return needed


def _is_ours(name: str, query_id: str) -> bool:
    parsed = parse_segment_name(name)
    return parsed is not None and parsed.query_id == query_id


_STEP = "restore it from a replica, or use another savepoint"


@dataclass(frozen=True, slots=True)
class Verification:
    """The result of reading a savepoint whole.

    Attributes:
        savepoint: The descriptor.
        problems: One message per damaged or missing object; empty where all is well.
    """

    savepoint: Savepoint
    problems: tuple[str, ...]


async def verify_savepoint(
    store: ObjectStore, runtime: Runtime, name: str, *, on_progress: OnProgress | None = None
) -> Verification:
    """Read and decode every byte of a savepoint, and report every object that is not sound.

    Raises:
        MissingState: There is no such savepoint.
        CorruptData: Its descriptor is damaged.
        Invalid: A newer version wrote it.
    """
    objects = SavepointObjects(store, runtime)
    savepoint = await objects.descriptor(check_savepoint_name(name))
    listed = {info.name: info for info in await objects.list(f"{name}/")}
    checkpoint = savepoint_as_checkpoint(savepoint)
    problems: list[str] = []
    done = 0
    for file, handle in zip(savepoint.files, checkpoint.materialized, strict=True):
        label = f"savepoint {name!r} in {store.location}: {handle.name}"
        try:
            check_size(listed.get(handle.name), handle.size)
            held = await RetryPolicy(runtime).read(partial(check_base, store, handle))
            for (group, _, _, expected), found in zip(file.parts, held, strict=True):
                if found != expected:
                    raise CorruptData(f"key group {group} has {found} entries, not {expected}")
        except MissingState:
            problems.append(f"{label} is not there; {_STEP}")
        except CorruptData as error:
            problems.append(f"{label} is damaged: {error}; {_STEP}")
        except DstlError as error:
            problems.append(f"{label}: {error}")
        done += len(file.parts)
        if on_progress is not None:
            on_progress(done, len(savepoint.operators) * savepoint.max_parallelism)
    return Verification(savepoint, tuple(problems))
