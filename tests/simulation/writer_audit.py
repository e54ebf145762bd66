"""The audit of attempts: which of them a checkpoint is made of, and whose output Spark has kept."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from handles.checkpoint import CompletedCheckpoint
from handles.key_group import partition_of
from tests.simulation.spark import TaskSpec, key_group_of
from tests.simulation.stage import Stage


class WriterAudit:
    """Remembers which attempts have acknowledged and which were kept, and compares the states of writers with them.

    Args:
        world: The world.
        fail: Takes an invariant's number and what was observed.
    """

    def __init__(self, world: Stage, fail: Callable[[str, str], None]) -> None:
        self._world = world
        self._fail = fail
        self._acknowledged: dict[bytes, bytes] = {}
        self._changing: set[bytes] = set()
        self._kept: dict[int, Mapping[tuple[str, int], Sequence[TaskSpec]]] = {}

    def changing(self, spec: TaskSpec) -> None:
        """The changes of a task are no function of its rows."""
        self._changing.add(spec.writer)

    def acknowledging(self, spec: TaskSpec, digest: bytes) -> None:
        """A task is about to acknowledge changes of this digest: only from now on may they count."""
        self._acknowledged[spec.writer] = digest

    def committed(self, batch: int, kept: Mapping[tuple[str, int], Sequence[TaskSpec]]) -> None:
        """Spark has committed a batch with the output of these attempts."""
        self._kept[batch] = kept

    def check(
        self, checkpoint: CompletedCheckpoint, operator: str, parallelism: int, writers: Mapping[bytes, bytes]
    ) -> None:
        """Every key was written last by an attempt that has acknowledged, one per partition, and whose changes are
        those of the attempt whose output Spark has kept (R5)."""
        logs, batch, groups = self._world.logs, checkpoint.batch_id, checkpoint.max_parallelism
        chosen: dict[int, bytes] = {}
        for key in {logs.key_of(operation): None for operation in logs.range_of(batch)}:
            writer = writers.get(key, b"")
            winner = chosen.setdefault(partition_of(key_group_of(key, groups), groups, parallelism), writer)
            if writer != winner or writer not in self._acknowledged or not writer.startswith(b"%d " % batch):
                self._fail(
                    "R5",
                    f"in checkpoint {checkpoint.checkpoint_id} of batch {batch} {operator} {key!r} was written by "
                    f"{writer!r}, another key of its partition by {winner!r}; only an attempt that acknowledged counts",
                )
                return
        # Nothing is compared by the product: the last attempt counts, whichever is kept. So only changes that are a
        # function of the rows must be those of the output.
        for (uid, partition), specs in self._kept.get(batch, {}).items():
            left = chosen.get(partition, b"") if uid == operator else b""
            for spec in specs:
                # Two drivers may run a batch; what the other one's sink has is not this checkpoint's.
                counts = bool(left) and spec.run == checkpoint.run_id and self._changing.isdisjoint((left, spec.writer))
                if counts and self._acknowledged.get(spec.writer) != self._acknowledged[left]:
                    self._fail(
                        "R5",
                        f"in checkpoint {checkpoint.checkpoint_id} of batch {batch} partition {partition} of "
                        f"{operator} is as {left!r} left it, and Spark has kept the output of {spec.writer!r}",
                    )
                    return
