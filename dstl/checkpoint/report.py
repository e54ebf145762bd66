"""Reports tell of a coordinator's work: the figures of a checkpoint, a start, a savepoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class CheckpointReport:
    """The figures of one completed checkpoint.

    Attributes:
        checkpoint_id: Its number.
        batch_id: Its micro-batch.
        seconds: From Spark's commit until every TaskManager knew: what the batch waited.
        requests: Requests to the object store, by all TaskManagers and the driver; deletions, which are made for many
            checkpoints at once, are not counted.
        new_bytes: Bytes of segments that this checkpoint added.
        full_bytes: Bytes of everything it refers to.
        inlined: Segments that were written inside the manifest.
        materializations: Finished ones that it is the first to name.
        estimated_recovery_seconds: How long restoring it would take, at the rate of the last restore.
        late_rows: By operator, how many rows of the batch were dropped because they came behind the watermark;
            operators without any are left out.
        persist_s: Part of ``seconds``: until every TaskManager had made its changes durable or handed them over, and
            the files that Spark wrote beside them were taken in.
        assemble_s: Part of it: the manifest was put together.
        commit_s: Part of it: the manifest was stored.
        notify_s: Part of it: the TaskManagers were told.
        hedges: How many of the requests were second ones for late uploads.
        state_rows: By operator, entries of its tables before the batch (of RocksDB, an estimate).
        state_bytes: By operator, their bytes.
        watermarks: By operator with event time, the watermark that the batch went by, Unix milliseconds; 0 before there
            is one. Timers up to it have fired.
    """

    checkpoint_id: int
    batch_id: int
    seconds: float
    requests: int
    new_bytes: int
    full_bytes: int
    inlined: int
    materializations: int = 0
    estimated_recovery_seconds: float = 0.0
    late_rows: Mapping[str, int] = field(default_factory=dict)
    persist_s: float = 0.0
    assemble_s: float = 0.0
    commit_s: float = 0.0
    notify_s: float = 0.0
    hedges: int = 0
    state_rows: Mapping[str, int] = field(default_factory=dict)
    state_bytes: Mapping[str, int] = field(default_factory=dict)
    watermarks: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RestoreReport:
    """The figures of one start of the query.

    Attributes:
        run_id: Spark's run id.
        checkpoint_id: What was restored; None for an empty state.
        seconds: From the first task's question until it could work.
        bytes: Bytes read from the store until then; bases that are loaded behind the batches are not among them.
        changes: Change records replayed.
        lost_batches: Batches whose effects the restored state lacks: 0, except where ``restore="previous"`` has chosen
            an older checkpoint.
        skipped: Why newer checkpoints were passed over.
        first_batch: The first micro-batch of the run, by Spark's own record of offsets.
        savepoint_batch: The last micro-batch in the savepoint, where the run has begun with one; None elsewhere. Where
            it is not the one before ``first_batch``, the sources are read from their start again.
    """

    run_id: str
    checkpoint_id: int | None
    seconds: float
    bytes: int
    changes: int
    lost_batches: int = 0
    skipped: tuple[str, ...] = ()
    first_batch: int = 0
    savepoint_batch: int | None = None


@dataclass(frozen=True, slots=True)
class SavepointReport:
    """The figures of one savepoint that was made.

    Attributes:
        location: What ``restore_from`` takes: ``LOCATION/savepoints/NAME``.
        checkpoint_id: The checkpoint that was copied.
        batch_id: The micro-batch whose effects it holds.
        bytes: Bytes of its files.
        entries: Entries of all states.
        seconds: How long it took.
    """

    location: str
    checkpoint_id: int
    batch_id: int
    bytes: int
    entries: int
    seconds: float
