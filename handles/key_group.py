"""Key groups: the unit in which state is owned, moved and read back.

A key's group is Spark's murmur3 (seed 42) of the grouping columns modulo the maximum parallelism, which is fixed for a
job's life. Ranges of key groups are *inclusive at both ends*, as in Flink; so are the formulas that share them out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

KeyGroup = int
"""A number in ``[0, max_parallelism)``."""

DEFAULT_MAX_PARALLELISM = 128  # Flink's smallest: room to grow for most jobs, and few key groups to look after
MAX_MAX_PARALLELISM = 1 << 15  # Flink's largest; a key group fits two bytes with values to spare


@dataclass(frozen=True, slots=True, order=True)
class KeyGroupRange:
    """Key groups from ``start`` to ``end``, both included. Never empty."""

    start: KeyGroup
    end: KeyGroup

    def __post_init__(self) -> None:
        if not 0 <= self.start <= self.end:
            raise ValueError(f"not a key group range: [{self.start}, {self.end}]")

    def __len__(self) -> int:
        return self.end - self.start + 1

    def __iter__(self) -> Iterator[KeyGroup]:
        return iter(range(self.start, self.end + 1))

    def __contains__(self, key_group: object) -> bool:
        return isinstance(key_group, int) and self.start <= key_group <= self.end

    def __str__(self) -> str:
        return f"{self.start}-{self.end}"

    def intersect(self, other: KeyGroupRange) -> KeyGroupRange | None:
        """Return the common part, or None where there is none."""
        start, end = max(self.start, other.start), min(self.end, other.end)
        return KeyGroupRange(start, end) if start <= end else None

    @staticmethod
    def all(max_parallelism: int) -> KeyGroupRange:
        """Return every key group of a job."""
        return KeyGroupRange(0, max_parallelism - 1)


def partition_of(key_group: KeyGroup, max_parallelism: int, parallelism: int) -> int:
    """Return the partition, in ``[0, parallelism)``, that a key group belongs to (Flink's formula)."""
    return key_group * parallelism // max_parallelism


def range_of_partition(partition: int, max_parallelism: int, parallelism: int) -> KeyGroupRange:
    """Return the key groups of one partition; over all partitions these cover every group exactly once.

    Raises:
        ValueError: ``parallelism`` is above ``max_parallelism`` (a partition would own nothing), or the partition is
            out of range.
    """
    if not 0 < parallelism <= max_parallelism:
        raise ValueError(f"parallelism {parallelism} is not in [1, {max_parallelism}], the maximum parallelism")
    if not 0 <= partition < parallelism:
        raise ValueError(f"partition {partition} is not in [0, {parallelism})")
    start = -(-partition * max_parallelism // parallelism)
    end = -(-(partition + 1) * max_parallelism // parallelism) - 1
    return KeyGroupRange(start, end)
