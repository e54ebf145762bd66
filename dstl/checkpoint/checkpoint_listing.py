"""What an operator wants to know of the checkpoints of a location, as plain values: behind ``dstl checkpoints``."""

from __future__ import annotations

from typing import Any

from dstl.checkpoint.manifest_format import manifest_name
from dstl.checkpoint.manifest_reader import ManifestReader
from dstl.checkpoint.manifest_scan import ManifestScan
from dstl.checkpoint.truncation import recovery_work
from dstl.errors import Invalid, MissingState
from dstl.runtime import Runtime
from dstl.store.base import ObjectStore
from handles.checkpoint import CheckpointId, CompletedCheckpoint, log_coverage, referenced_objects

__all__ = ["describe_checkpoint", "list_checkpoints"]


async def list_checkpoints(store: ObjectStore, runtime: Runtime) -> dict[str, Any]:
    """Return the checkpoints of a location, oldest first, damaged records included. Only reads.

    Raises:
        Invalid: No query has used this location.
        Unavailable: The store did not answer several times in a row.
    """
    scan = await _scan(store, runtime)
    rows = []
    before: CompletedCheckpoint | None = None
    for checkpoint in scan.retained:
        rows.append(_summary(checkpoint, before, scan))
        before = checkpoint
    for sequence, error in sorted(scan.damaged.items()):
        rows.append({"checkpoint_id": sequence, "state": "damaged", "detail": str(error)})
    rows.sort(key=lambda row: row["checkpoint_id"])
    return {"location": store.location, "query_id": scan.query_id, "epoch": scan.epoch, "checkpoints": rows}


async def describe_checkpoint(
    store: ObjectStore, runtime: Runtime, checkpoint_id: CheckpointId | None = None
) -> dict[str, Any]:
    """Return everything that one checkpoint is made of, the latest by default. Only reads.

    Raises:
        MissingState: There is none, or none of that number.
        CorruptData: Its record is damaged.
        Invalid: No query has used this location, or a newer version wrote the record.
    """
    scan = await _scan(store, runtime)
    retained = scan.retained
    if checkpoint_id is None and scan.damaged and (not retained or max(scan.damaged) > retained[-1].checkpoint_id):
        raise scan.damaged[max(scan.damaged)]
    if checkpoint_id is not None and checkpoint_id in scan.damaged:
        raise scan.damaged[checkpoint_id]
    at = next((i for i, c in enumerate(retained) if c.checkpoint_id == checkpoint_id), None)
    if checkpoint_id is None and retained:
        at = len(retained) - 1
    if at is None:
        held = ", ".join(str(c.checkpoint_id) for c in retained) or "none"
        raise MissingState(f"{store.location} has no checkpoint {checkpoint_id or ''} (it has {held})")
    checkpoint = retained[at]
    sqns = log_coverage(checkpoint)
    return {
        "location": store.location,
        **_summary(checkpoint, retained[at - 1] if at else None, scan),
        "max_parallelism": checkpoint.max_parallelism,
        "operators": [
            {
                "uid": operator.uid,
                "parallelism": operator.parallelism,
                "key_types": operator.key_types,
                "watermark_ms": operator.watermark_ms,
                "states": operator.registry,
            }
            for operator in checkpoint.operators
        ],
        "bases": [
            {
                "object": base.name,
                "operator": base.operator,
                "checkpoint_id": base.checkpoint,
                "size": base.total_size,
                "files": len(base.files),
                "key_groups": len(base.parts),
            }
            for base in checkpoint.materialized
        ],
        "logs": [
            {
                "log_id": log.log_id,
                "operator": log.operator,
                "key_groups": str(log.key_groups),
                "from_sqn": sqns[log.log_id].from_sqn,
                "to_sqn": sqns[log.log_id].to_sqn,
            }
            for log in checkpoint.logs
        ],
        "segments": [
            {
                "object": entry.handle.name,
                "offset": entry.handle.offset,
                "size": entry.handle.size,
                "checkpoint_id": entry.checkpoint,
                "key_groups": str(entry.key_groups),
                "logs": len({log for log, _, _ in entry.ranges}),
            }
            for entry in checkpoint.segments
        ],
    }


async def _scan(store: ObjectStore, runtime: Runtime) -> ManifestScan:
    scan = await ManifestReader(store, runtime).scan()
    if not scan.listed:
        raise Invalid(f"{store.location} is not a location of DSTL: it holds no manifest")
    return scan


def _summary(checkpoint: CompletedCheckpoint, before: CompletedCheckpoint | None, scan: ManifestScan) -> dict[str, Any]:
    work = recovery_work(checkpoint)
    return {
        "checkpoint_id": checkpoint.checkpoint_id,
        "state": "retained",
        "batch_id": checkpoint.batch_id,
        "parent": checkpoint.parent,
        "run_id": checkpoint.run_id,
        "created_at": checkpoint.created_at,
        "seconds_since_previous": checkpoint.created_at - before.created_at if before else None,
        "watermark_ms": checkpoint.watermark_ms,
        "manifest_bytes": scan.listed[checkpoint.checkpoint_id].size,
        "new_bytes": _new_bytes(checkpoint, before),
        "full_bytes": checkpoint.full_bytes,
        "restore_bytes": work.bytes,
        "objects": len(set(referenced_objects(checkpoint)) | {manifest_name(checkpoint.checkpoint_id)}),
        "segments_inlined": sum(s.segment[0] == manifest_name(s.checkpoint) for s in checkpoint.segments),
        "segments_stored": sum(s.segment[0] != manifest_name(s.checkpoint) for s in checkpoint.segments),
        "base_files": len({name for base in checkpoint.materialized for name in base.objects()}),
    }


def _new_bytes(checkpoint: CompletedCheckpoint, before: CompletedCheckpoint | None) -> int:
    """Return the bytes that came with this checkpoint and that the one before it does not refer to."""
    known = {s.segment for s in before.segments} if before else set()
    fresh = {s.segment: s.segment[1] for s in checkpoint.segments if s.segment not in known}
    bases = {name for base in before.materialized for name in base.objects()} if before else set()
    sizes = dict(each for base in checkpoint.materialized for each in base.sizes())
    return sum(fresh.values()) + sum(size for name, size in sizes.items() if name not in bases)
