"""Checkpoints and records for the tests of this room."""

from typing import Any

from dstl.checkpoint.manifest.format import ManifestRecord, manifest_name
from dstl.checkpoint.manifest.log import ManifestLog
from dstl.store.base import ObjectStore
from handles.checkpoint import CompletedCheckpoint, LogEntry, OperatorEntry, SegmentEntry
from tests.simulation.virtual_time import seeded_runtime

QUERY = "0c0a1b2c-1111-2222-3333-444455556666"


def checkpoint(
    sequence: int,
    batch_id: int,
    *,
    parent: int | None = None,
    objects: tuple[str, ...] = (),
    query_id: str = QUERY,
    **fields: object,
) -> CompletedCheckpoint:
    """A checkpoint that refers to these objects, one log with one change set in each, or is made of these fields."""
    made: dict[str, Any] = {
        "checkpoint_id": sequence,
        "batch_id": batch_id,
        "query_id": query_id,
        "run_id": "run",
        "parent": parent,
        "max_parallelism": 128,
        "created_at": 1.5,
        "operators": (OperatorEntry(uid="op", parallelism=4, key_types="string", registry={"ttl": None, "n": 1}),),
        "segments": tuple(
            SegmentEntry(
                segment=(name, 10, 7, 0), first_key_group=0, last_key_group=127, ranges=((0, at, at + 1),), checkpoint=0
            )
            for at, name in enumerate(objects)
        ),
    }
    if objects:
        made["logs"] = (LogEntry(log_id="log", operator="op", first_key_group=0, last_key_group=127),)
    return CompletedCheckpoint(**(made | fields))


def record(kind: str, sequence: int, epoch: int = 1, **fields: object) -> ManifestRecord:
    """A record of this kind; a checkpoint's holds one, unless it is among the fields."""
    made = {"put_id": "p", "query_id": QUERY, "created_at": 2.5, **fields}
    if kind == "checkpoint" and "checkpoint" not in made:
        made["checkpoint"] = checkpoint(sequence, 0, objects=("a/b", "a/c"))
    return ManifestRecord(kind=kind, sequence=sequence, epoch=epoch, **made)  # type: ignore[arg-type]


def record_of(body: CompletedCheckpoint, **fields: object) -> ManifestRecord:
    """The record that holds a checkpoint."""
    return record("checkpoint", body.checkpoint_id, checkpoint=body, query_id=body.query_id, **fields)


def driver(store: ObjectStore, seed: int, attempts: int = 4) -> ManifestLog:
    return ManifestLog(store, seeded_runtime(seed), attempts=attempts)


async def begun(store: ObjectStore, seed: int, batches: int = 0) -> ManifestLog:
    """Return the log of a driver that leads, and has committed so many batches."""
    log = driver(store, seed)
    await log.fence(QUERY)
    for batch in range(batches):
        await commit(log, batch)
    return log


async def commit(log: ManifestLog, batch_id: int, *, oldest: int = 0, objects: tuple[str, ...] = ()) -> int:
    """Commit the next checkpoint and return its number."""
    body = checkpoint(log.next_sequence, batch_id, objects=objects)
    await log.commit(body, [], oldest=oldest)
    return body.checkpoint_id


async def names(store: ObjectStore, prefix: str = "") -> list[str]:
    return [info.name async for info in store.list(prefix)]


async def kinds(store: ObjectStore) -> dict[int, str]:
    """Return the records of the manifest log, by number."""
    log = ManifestLog(store, seeded_runtime(0))
    return {
        s: (await log.read(s)).kind for s in range(1, await log.tail() + 1) if manifest_name(s) in await names(store)
    }
