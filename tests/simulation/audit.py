"""The invariants (``I1`` to ``I21`` of the reliability reference), checked at every step of a simulated world.

And three that hold when nothing has been wrong for long: ``calm_audit``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import google_crc32c

from dstl.checkpoint.manifest.format import (
    FORGOTTEN_S,
    ManifestRecord,
    decode_record,
    manifest_name,
    manifest_sequence,
)
from dstl.checkpoint.manifest.reader import retained_of
from dstl.checkpoint.report import CheckpointReport
from dstl.checkpoint.savepoint.format import SAVEPOINTS, Savepoint
from dstl.checkpoint.savepoint.restore import savepoint_as_checkpoint
from dstl.errors import CheckpointDeclined, CorruptData, DstlError, Invalid, MissingState, StateTooLarge
from handles.checkpoint import CompletedCheckpoint, log_coverage, referenced_objects
from handles.key_group import KeyGroupRange, range_of_partition
from materializer.tables.base import StateTable
from materializer.tables.heap import HeapStateTable
from tests.simulation.calm_audit import CalmAudit
from tests.simulation.clocked_model import Batch
from tests.simulation.damage_audit import DamageAudit
from tests.simulation.directory_audit import DirectoryAudit
from tests.simulation.face_audit import FaceAudit
from tests.simulation.faults import FaultKind
from tests.simulation.raw_store import RawStore
from tests.simulation.spark import OPERATIONS, WRITERS, TaskSpec, decode_value, decode_values, keys_of
from tests.simulation.stage import Stage, driver_of
from tests.simulation.store import Stored
from tests.simulation.user_faces import AWAY
from tests.simulation.virtual_time import seeded_runtime
from tests.simulation.writer_audit import WriterAudit
from tests.worlds.restored import restore_tables

_CHECKED_EVERY = 3  # a whole restore costs more than the batch; reads check every batch, the end all that is left
_MOST_MANIFEST_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Violation:
    """An invariant that did not hold.

    Attributes:
        invariant: Its number in the reliability reference.
        at: Virtual seconds since the world began.
        what: The observation.
    """

    invariant: str
    at: float
    what: str

    def __str__(self) -> str:
        return f"{self.invariant} at {self.at:.3f} s: {self.what}"


class Auditor:
    """Sees every request, every read of a task and every report; remembers what it may compare with later."""

    def __init__(self, world: Stage, objects: Mapping[str, Stored]) -> None:
        self.violations: list[Violation] = []
        self.checkpoints = 0
        self.verified = 0
        self.live: dict[int, ManifestRecord] = {}
        self.faces = FaceAudit(world.logs, world.faces, self.fail, lambda: world.clocks_set, world.version_of)
        self.calm = CalmAudit(world, self.fail)
        self.damage = DamageAudit(world, self.fail)
        self._world = world
        self._objects = objects
        self._flying: dict[int, ManifestRecord] = {}
        self._names: dict[int, frozenset[str]] = {}
        self._held: frozenset[str] = frozenset()
        self._directory = DirectoryAudit(world, objects, self.fail)
        self._highest = self._boundary = 0
        self._writers = WriterAudit(world, self.fail)
        self._landed: set[tuple[str, int]] = set()
        self._digests: dict[str, int] = {}
        self._put_ids: dict[int, str] = {}
        self._epochs: dict[int, int] = {}
        self._deleted: dict[int, float] = {}
        """Records, and how many seconds old they were."""
        self._fences: list[int] = []
        self._checked: dict[tuple[str, int, int], int] = {}
        self._checking: list[asyncio.Task[None]] = []

    def fail(self, invariant: str, what: str) -> None:
        """Note a violation; the world ends with the first."""
        world = self._world
        self.violations.append(Violation(invariant, world.loop.time() - world.began, what))
        world.trace("violation", f"{invariant} {what}")
        world.violated.set()

    # What the store tells.

    def sent(self, request: int, name: str, body: bytes) -> None:
        """A PUT is on its way: from now on what a manifest names must not be deleted."""
        if manifest_sequence(name) is not None:
            self._flying[request] = decode_record(body, name)

    def dropped(self, request: int) -> None:
        """A PUT will never be applied."""
        self._flying.pop(request, None)

    def landed(self, request: int, name: str, body: bytes) -> None:
        """A PUT was applied."""
        record = self._flying.pop(request, None)
        digest = google_crc32c.value(body)
        if self._digests.setdefault(name, digest) != digest:
            self.fail("I4", f"{name} has been stored with two different contents")
        sequence = manifest_sequence(name)
        if sequence is not None and record is not None:
            self._record_landed(sequence, record, len(body))

    def deleting(self, name: str) -> None:
        """An object is about to be deleted."""
        sequence = manifest_sequence(name)
        if sequence is not None:
            self._record_deleted(sequence)
            return
        self._directory.deleting(name)
        if name in self._held:
            holders = [c.checkpoint_id for c in self.retained() if name in self._names[c.checkpoint_id]]
            self.fail("I5", f"{name} was deleted, and checkpoints {holders} need it")
        for record in self._flying.values():
            if record.checkpoint is None or record.sequence in self._put_ids:
                continue
            if name in referenced_objects(record.checkpoint):
                self.fail("I5", f"{name} was deleted while the commit of checkpoint {record.sequence} is on its way")

    def _record_landed(self, sequence: int, record: ManifestRecord, size: int) -> None:
        known = self._put_ids.setdefault(sequence, record.put_id)
        # A fence or an abort marker may land at a number whose checkpoint was cleaned away, and so may a checkpoint of
        # a driver that has slept since for a day: they are void, for there are records above them.
        age_s = self._deleted.get(sequence, -1.0)
        if known != record.put_id and age_s < (FORGOTTEN_S if record.kind == "checkpoint" else 0.0):
            self.fail("I10", f"record {sequence} was committed twice, with different bodies")
        self._boundary = max(self._boundary, record.oldest)
        if sequence < self._highest:
            # A late or repeated request, or a fence, at a number that was cleaned: it must mean nothing.
            self._world.trace("void", f"{record.kind} {sequence}")
            if sequence in self._deleted and record.checkpoint is not None:
                self.live[sequence] = record
                self._names[sequence] = frozenset(referenced_objects(record.checkpoint))
                if any(c.checkpoint_id == sequence for c in self.retained()):
                    self.fail("I10", f"checkpoint {sequence} was deleted and has come back to life")
            return
        self._highest = sequence
        self._epochs[sequence] = record.epoch
        if record.kind == "fence":
            self._fences.append(sequence)
            self._directory.fenced()
            return
        below = [fence for fence in self._fences if fence < sequence]
        if not below or below[-1] != record.epoch:
            self.fail("I11", f"record {sequence} of epoch {record.epoch} was committed behind fence {below[-1:]}")
        if size > _MOST_MANIFEST_BYTES:
            self.fail("I15", f"manifest {sequence} has {size} bytes")
        self._world.given_up += record.kind == "abort"
        if record.files is not None:
            self._directory.landed(sequence, record.files)
        if record.checkpoint is not None:
            self._checkpoint_landed(sequence, record, record.checkpoint)

    def _checkpoint_landed(self, sequence: int, record: ManifestRecord, checkpoint: CompletedCheckpoint) -> None:
        world = self._world
        self.checkpoints += 1
        self._landed.add((checkpoint.run_id, checkpoint.batch_id))
        world.wrote(checkpoint.run_id)
        self.live[sequence] = record
        self._names[sequence] = frozenset(referenced_objects(checkpoint))
        self._hold()
        parent = self.live.get(checkpoint.parent or 0)
        if parent is not None and parent.checkpoint is not None:
            self._check_growth(parent.checkpoint, checkpoint)
        self._check_objects(checkpoint)
        self.faces.landed(checkpoint)
        world.materialized += bool(checkpoint.materialized)
        world.trace("checkpoint", f"{sequence} batch {checkpoint.batch_id}")
        if sequence % _CHECKED_EVERY == 0:
            self._check_beside(checkpoint)

    def _check_growth(self, parent: CompletedCheckpoint, child: CompletedCheckpoint) -> None:
        """A log only grows from parent to child (I9), and the coverage is whole (I1)."""
        if not self._world.logs.lost.issuperset(range(parent.batch_id + 1, child.batch_id)):
            self.fail("I9", f"checkpoint {child.checkpoint_id} of batch {child.batch_id} has parent {parent.batch_id}")
        held = log_coverage(child)
        for log_id, before in log_coverage(parent).items():
            now = held.get(log_id)
            if now is not None and now.to_sqn < before.to_sqn:
                self.fail("I1", f"log {log_id} shrank from {before} to {now} in checkpoint {child.checkpoint_id}")

    def _check_objects(self, checkpoint: CompletedCheckpoint) -> None:
        """Everything that a checkpoint names exists, with the size and checksum that it names (I3)."""
        named = [(h.name, h.offset, h.size, h.checksum) for h in (each.handle for each in checkpoint.segments)]
        named += [(h.name, 0, h.size, h.checksum) for h in checkpoint.materialized]
        named += [(f.name, 0, f.size, f.checksum) for h in checkpoint.materialized for f in h.files]
        for name, offset, size, checksum in named:
            stored = self._world.damaged.get(name) or self._objects.get(name)
            if stored is None:
                self.fail("I3", f"checkpoint {checkpoint.checkpoint_id} names {name}, which is not there")
                continue
            key = (name, offset, size)
            if key not in self._checked:
                part = stored.body[offset : offset + size]
                self._checked[key] = google_crc32c.value(part) if len(part) == size else -1
            if self._checked[key] != checksum:
                self.fail("I3", f"checkpoint {checkpoint.checkpoint_id} names {name}, and other bytes are there")
        for name in self._names[checkpoint.checkpoint_id]:
            if name not in self._objects:
                self.fail("I3", f"checkpoint {checkpoint.checkpoint_id} names {name}, which is not there")

    def _record_deleted(self, sequence: int) -> None:
        age_s = self._world.loop.time() - self._objects[manifest_name(sequence)].modified
        self._deleted[sequence] = age_s
        is_new = sequence >= self._boundary or age_s < FORGOTTEN_S
        if sequence in self._fences and (is_new or sequence == self._fences[-1]):
            self.fail("I10", f"fence {sequence} was deleted: put-if-absent forgets that a newer driver had it")
        retained = [each.checkpoint_id for each in self.retained()]
        if sequence in retained:
            self.fail("I5", f"the manifest of checkpoint {sequence} was deleted; retained are {retained}")
        self._names.pop(sequence, None)
        self._directory.record_deleted(sequence)
        self.live.pop(sequence, None)
        self._hold()

    def retained(self) -> list[CompletedCheckpoint]:
        """Return the checkpoints that a driver which starts now must be able to restore, oldest first."""
        checkpoints = (record.checkpoint for _, record in sorted(self.live.items()))
        return retained_of(c for c in checkpoints if c is not None and c.checkpoint_id >= self._boundary)

    def _hold(self) -> None:
        """Note what retained checkpoints need, and that the one which a restart needs is among them."""
        retained = self.retained()
        self._held = frozenset(name for each in retained for name in self._names[each.checkpoint_id])
        needed = self._world.logs.committed - 1
        if needed >= 0 and needed not in {each.batch_id for each in retained}:
            held = [each.batch_id for each in retained]
            self.fail("I8", f"the last committed batch {needed} has no checkpoint any more; there are {held}")

    # What the processes tell.

    def read(self, spec: TaskSpec, key: bytes, value: bytes) -> None:
        """A task has read a key's state: it must be that of the batch before (I7)."""
        expected = self._world.logs.state_after(spec.batch - 1).get(key, b"")
        if value != expected:
            self.fail(
                "I7",
                f"attempt {spec.attempt} of {spec.operator} in batch {spec.batch} ({spec.run}) read {key!r} as "
                f"{decode_value(value)}, not {decode_value(expected)}",
            )

    def face_output(self, spec: TaskSpec, parent: int | None, batch: Batch, output: dict[bytes, list[str]]) -> None:
        """An attempt of an operator of a face has yielded this (I7)."""
        self.faces.output(spec, parent, batch, output)

    def rules_read(self, spec: TaskSpec, rules: Mapping[int, bytes]) -> None:
        """A task has read the broadcast state: it must be that of the batch before and the batch's own rules (I7)."""
        expected = self._world.logs.rules_after(spec.batch)
        if rules != expected:
            self.fail(
                "I7",
                f"attempt {spec.attempt} of {spec.operator} in batch {spec.batch} ({spec.run}) read the rules "
                f"{decode_values(rules)}, not {decode_values(expected)}",
            )

    def changing(self, spec: TaskSpec) -> None:
        """The changes of a task are no function of its rows."""
        self._writers.changing(spec)

    def acknowledging(self, spec: TaskSpec, digest: bytes) -> None:
        """A task is about to acknowledge changes of this digest: only from now on may they count."""
        self._writers.acknowledging(spec, digest)

    def task_error(self, spec: TaskSpec, error: BaseException) -> None:
        """A task has failed: only with an error that a fault may lead to (I21)."""
        self._world.trace("task-error", f"{spec.run} {spec.batch} {spec.attempt} {type(error).__name__}")
        unexpected = not isinstance(error, DstlError) or type(error) is DstlError or isinstance(error, Invalid)
        if isinstance(error, Invalid) and "schema" in str(error):
            unexpected = not self._world.is_outdated(driver_of(spec.run))
        if "not deterministic" in str(error):
            unexpected = not self._world.plan.per_task.get(FaultKind.CHANGING_OUTPUT)
        unexpected = self._world.plan.healed if AWAY in str(error) else unexpected
        # A read that waits for what is being restored says it through the processor's call.
        if any(isinstance(each, StateTooLarge) for each in (error, *error.args)):
            unexpected = not self._world.fired[FaultKind.MEMORY_FULL]
        lost = not self.damage.is_refusal(error) and not self._world.may_corrupt
        lost = lost and isinstance(error, (MissingState, CorruptData))
        if self._world.is_calm:
            self.fail("I22", f"attempt {spec.attempt} of batch {spec.batch} has failed without a fault: {error!r}")
        if unexpected or lost:
            self.fail("I21" if unexpected else "I6", f"attempt {spec.attempt} of batch {spec.batch}: {error!r}")

    def checkpoint_reported(self, driver: str, epoch: int, report: CheckpointReport) -> None:
        """A driver believes that it has completed a checkpoint (I11, I12)."""
        self._world.trace("completed", f"{driver} {report.checkpoint_id} batch {report.batch_id}")
        if self._epochs.get(report.checkpoint_id) != epoch:
            self.fail(
                "I11", f"{driver} of epoch {epoch} reports checkpoint {report.checkpoint_id}, which is not its own"
            )
        self.calm.reported(report)

    def fenced(self, driver: str, error: BaseException | None) -> None:
        """A driver stops because another has taken over: there must have been another (I11)."""
        if self._world.drivers_started == 1:
            self.fail("I11", f"{driver} has fenced itself: {error}")

    def query_failed(self, driver: str, cause: BaseException | None) -> None:
        """A query has failed: not when nothing has been wrong for long (I22)."""
        self._world.trace("query-failed", f"{driver} {type(cause).__name__}")
        if self._world.is_calm:
            self.fail("I22", f"{driver} has failed without a fault: {cause!r}")
        while cause is not None:
            if isinstance(cause, CheckpointDeclined) and not isinstance(cause.__cause__, (DstlError, type(None))):
                self.fail("I21", f"{driver}: a checkpoint was declined for an error of our own: {cause.__cause__!r}")
            cause = cause.__cause__

    @property
    def highest(self) -> int:
        """Number of the newest record."""
        return self._highest

    def is_durable(self, path: str) -> bool:
        """Return whether a record holds a barrier of Spark's."""
        return path in self._directory.barriers

    def has_landed(self, run: str, batch: int) -> bool:
        """Return whether a record holds the checkpoint that a run made of a batch."""
        return (run, batch) in self._landed

    def sink_commits(self, driver: str, batch: int) -> None:
        """A sink is about to commit a batch: its offsets must be durable, and the commit before them (I8)."""
        needed = [f"offsets/{batch}"] + ([f"commits/{batch - 1}"] if batch else [])
        for path in needed:
            if not self.is_durable(path):
                self.fail("I8", f"a sink of {driver} commits batch {batch}, and {path} is not durable")

    def batch_committed(self, driver: str, batch: int, kept: Mapping[tuple[str, int], Sequence[TaskSpec]]) -> None:
        """Spark has committed a batch with the output of these attempts: its effects must be durable (I8)."""
        self._writers.committed(batch, kept)
        world = self._world
        world.trace("committed", f"{driver} {batch}")
        newest = next((each for each in reversed(self.retained()) if each.batch_id == batch), None)
        if newest is None:
            # A driver that was stopped behind its record hears of it when others have gone on, and subsumed it.
            run = next((spec.run for specs in kept.values() for spec in specs), "")
            overtaken = any(each.batch_id > batch for each in self.retained())
            if not (overtaken and (run, batch) in self._landed):
                self.fail("I8", f"{driver} has committed batch {batch}, and no checkpoint holds it")
            return
        self.faces.committed(newest, kept)
        if world.plan.per_task.get(FaultKind.CHANGING_OUTPUT):
            self._check_beside(newest)

    def process_error(self, message: str, error: BaseException | None) -> None:
        """Something failed in the background and nobody has dealt with it (I21)."""
        self.fail("I21", f"{message}: {error!r}")

    # Whole states.

    async def check_retained(self, newest: int = 0) -> None:
        """Restore every checkpoint that a driver would find, or so many, whole and in parts (I6, I7, I20)."""
        for checkpoint in self.retained()[-newest:]:
            self._check_objects(checkpoint)
            parts = 1 + checkpoint.checkpoint_id % 3
            await self._check_restored(checkpoint, dict(self._objects), parts=parts)

    async def check_savepoint(self, savepoint: Savepoint) -> None:
        """Restore a savepoint as the state of the checkpoint that it is a copy of (I6)."""
        await self._check_restored(savepoint_as_checkpoint(savepoint), dict(self._objects), parts=1)

    async def check_first(self, checkpoint: CompletedCheckpoint, objects: dict[str, Stored]) -> None:
        """Restore the first checkpoint of a query that begins with a savepoint, in its own location (I6)."""
        await self._check_restored(checkpoint, objects, parts=2)

    async def settle(self) -> None:
        """Wait for the checks under way."""
        await asyncio.gather(*self._checking)

    def _check_beside(self, checkpoint: CompletedCheckpoint) -> None:
        """Restore a checkpoint while the world goes on; not in a driver's context, with which it would end."""
        check = self._check_restored(checkpoint, self.damage.as_before(self._objects), parts=1)
        task = self._world.loop.create_task(check, context=self._world.context)
        self._checking = [each for each in self._checking if not each.done()] + [task]

    async def _check_restored(self, checkpoint: CompletedCheckpoint, objects: dict[str, Stored], parts: int) -> None:
        world = self._world
        store = RawStore(objects)
        runtime = seeded_runtime(0)
        expected = world.logs.state_after(checkpoint.batch_id)
        found: dict[str, dict[bytes, bytes]] = {}
        writers: dict[str, dict[bytes, bytes]] = {}
        groups = checkpoint.max_parallelism
        faces: dict[str, list[StateTable]] = {}
        for part in range(parts):
            owned = range_of_partition(part, groups, parts) if parts > 1 else KeyGroupRange.all(groups)
            try:
                restored = await restore_tables(checkpoint, store, owned, lambda _: HeapStateTable(), runtime)
            except DstlError as error:
                self.fail("I6", f"checkpoint {checkpoint.checkpoint_id} cannot be restored: {error!r}")
                return
            for operator, table in restored.tables.items():
                if operator in self.faces.operators:
                    faces.setdefault(operator, []).append(table)
                    continue
                state = found.setdefault(operator, {})
                for group in table.key_groups():
                    for entry in table.scan(WRITERS, group):
                        writers.setdefault(operator, {})[entry.key] = entry.value
                    for entry in table.scan(OPERATIONS, group):
                        if entry.key in state:
                            self.fail("I20", f"{entry.key!r} is in two parts of checkpoint {checkpoint.checkpoint_id}")
                        state[entry.key] = entry.value
                table.close()
        self.verified += 1
        self.faces.restored(checkpoint, faces)
        for operator in world.operators:
            state = found.get(operator, {})
            for key in keys_of(world.logs):
                if state.get(key, b"") != expected.get(key, b""):
                    self.fail(
                        "I6",
                        f"checkpoint {checkpoint.checkpoint_id} (batch {checkpoint.batch_id}) holds {operator} {key!r} "
                        f"as {decode_value(state.get(key, b''))}, not {decode_value(expected.get(key, b''))}",
                    )
                    return
        for each in checkpoint.operators:
            if each.uid in self.faces.operators:
                continue
            self._writers.check(checkpoint, each.uid, each.parallelism, writers.get(each.uid, {}))

    def orphans(self) -> list[str]:
        """Return the objects that no manifest in the store names."""
        return [
            name
            for name in sorted(self._objects)
            if manifest_sequence(name) is None
            and name not in self._held
            and not name.startswith(SAVEPOINTS)
            and not self._directory.may_need(name)
        ]
