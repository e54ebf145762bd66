"""Sizes of bases and log by operator and key group: where state is uneven."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from handles.checkpoint import CompletedCheckpoint
from handles.materialized_handle import generations_of


@dataclass(frozen=True, slots=True)
class OperatorSizes:
    """Sizes of one operator in a checkpoint, by key group.

    Attributes:
        operator: Its name.
        bases: Bytes of the newest base of each key group.
        log: Bytes of log of each key group, about: a segment's bytes are shared evenly among its logs, and a log's
            among its key groups.
        base_objects: Number of objects of all its bases.
        segments: Number of segments that hold log of it.
    """

    operator: str
    bases: Sequence[int]
    log: Sequence[float]
    base_objects: int
    segments: int

    @property
    def skew(self) -> float:
        """The largest key group's bytes divided by the mean of all; 1 is even, 0 where there is nothing."""
        sizes = [base + log for base, log in zip(self.bases, self.log, strict=True)]
        return max(sizes) * len(sizes) / sum(sizes) if sum(sizes) else 0.0

    @property
    def largest(self) -> int:
        """The largest key group."""
        sizes = [base + log for base, log in zip(self.bases, self.log, strict=True)]
        return sizes.index(max(sizes))


def operator_sizes(checkpoint: CompletedCheckpoint) -> list[OperatorSizes]:
    """Return the sizes of every operator of a checkpoint, in its order."""
    groups = checkpoint.max_parallelism
    generations = generations_of(checkpoint.materialized)
    log: dict[str, list[float]] = {each.uid: [0.0] * groups for each in checkpoint.operators}
    segments: dict[str, set[tuple[object, ...]]] = {each.uid: set() for each in checkpoint.operators}
    # One that is listed twice counts once.
    listed = Counter(entry.segment for entry in checkpoint.segments)
    for entry in checkpoint.segments:
        share = entry.segment[1] / listed[entry.segment] / max(1, len(entry.ranges))
        for number, _, _ in entry.ranges:
            of = checkpoint.logs[number]
            held = entry.key_groups.intersect(of.key_groups) or of.key_groups
            for group in held:
                log[of.operator][group] += share / len(held)
            segments[of.operator].add(entry.segment)
    return [
        OperatorSizes(
            operator.uid,
            [
                bases[0].length if (bases := generations.get(operator.uid, {}).get(group)) else 0
                for group in range(groups)
            ],
            log[operator.uid],
            len({name for base in checkpoint.materialized if base.operator == operator.uid for name in base.objects()}),
            len(segments[operator.uid]),
        )
        for operator in checkpoint.operators
    ]
