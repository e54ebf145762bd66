"""Lists of the checkpoints and states of a location, as plain values for ``dstl checkpoints`` and ``dstl state``."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

from dstl.checkpoint.assembly import recovery_work
from dstl.checkpoint.manifest.format import manifest_name
from dstl.checkpoint.manifest.reader import ManifestReader, ManifestScan
from dstl.checkpoint.savepoint.format import SavepointObjects, check_savepoint_name
from dstl.runtime import Runtime
from dstl.store.base import ObjectStore
from handles.checkpoint import CheckpointId, CompletedCheckpoint, log_coverage, referenced_objects


async def list_checkpoints(store: ObjectStore, runtime: Runtime) -> dict[str, Any]:
    """Return the checkpoints of a location, oldest first, damaged records included. Only reads.

    Raises:
        Invalid: No query has used this location.
        Unavailable: The store did not answer several times in a row.
    """
    scan = await ManifestReader(store, runtime).scan_used()
    rows = [_summary(each, before, scan) for before, each in pairwise([None, *scan.retained]) if each is not None]
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
    scan = await ManifestReader(store, runtime).scan_used()
    checkpoint = scan.choose(checkpoint_id, store.location)
    before = next((c for c in reversed(scan.retained) if c.checkpoint_id < checkpoint.checkpoint_id), None)
    sqns = log_coverage(checkpoint)
    return {
        "location": store.location,
        **_summary(checkpoint, before, scan),
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


async def list_states(
    store: ObjectStore, runtime: Runtime, checkpoint_id: CheckpointId | None = None, savepoint: str | None = None
) -> list[dict[str, Any]]:
    """Return the states of a checkpoint, the latest by default, or of a savepoint, by operator. Only reads.

    Raises:
        MissingState: There is no such checkpoint or savepoint.
        CorruptData: Its record is damaged.
        Invalid: No query has used this location, or a newer version wrote the record.
    """
    if savepoint is not None:
        of = await SavepointObjects(store, runtime).descriptor(check_savepoint_name(savepoint))
        operators = [(entry.uid, entry.registry) for entry in of.operators]
    else:
        found = await describe_checkpoint(store, runtime, checkpoint_id)
        operators = [(operator["uid"], operator["states"]) for operator in found["operators"]]
    return [
        {
            "operator": uid,
            "state": state.get("name"),
            "kind": state.get("kind"),
            "key": _columns(registry.get("key")),
            "user_key": _columns(state.get("user_key")),
            "value": _columns((state.get("schemas") or [None])[-1]),
            "ttl_ms": state.get("ttl_ms", 0),
        }
        for uid, registry in operators
        for state in registry.get("states", ())
    ]


def _columns(schema: Any) -> str:
    """Return a stored schema as people write it; anything else is shown as it is."""
    try:
        return ", ".join(
            f"{field['name']} {_type(field['type'])}" for field in json.loads(schema or '{"fields": []}')["fields"]
        )
    except (KeyError, TypeError, ValueError, RecursionError):
        return str(schema)


def _type(kind: Any) -> str:
    if isinstance(kind, str):
        return kind
    if kind["type"] == "array":
        return f"array<{_type(kind['elementType'])}>"
    if kind["type"] == "map":
        return f"map<{_type(kind['keyType'])}, {_type(kind['valueType'])}>"
    if kind["type"] == "struct":
        return f"struct<{', '.join(field['name'] + ': ' + _type(field['type']) for field in kind['fields'])}>"
    return str(kind["type"])


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
    known = before.sizes() if before else {}
    return sum(size for each, size in checkpoint.sizes().items() if each not in known)
