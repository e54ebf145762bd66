"""A query's logs and tasks: offsets are written before a batch runs, its commit after all its tasks have ended well.

The checkpoint directory of a query, its source, and the state that each batch must lead to.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain

from dstl.rpc.messages import TaskAttempt
from handles.key_group import partition_of

Key = bytes

STATES = ("operations", "writers", "differences")
"""Names of the operators' states."""
OPERATIONS = STATES.index("operations")
"""The state that holds the operations of each key."""
WRITERS = STATES.index("writers")
"""The state that holds, for each key, which attempt has written it last: it must be one whose changes count."""
DIFFERENCES = STATES.index("differences")
"""The state that a processor writes whose changes are no function of its rows."""
RULES = "rules"
"""The broadcast stream and its state, which every partition writes alike."""
_RULES_EVERY, _RULES = 2, 3
RULE_GOES, RULES_GO = range(10, 1 << 20, 14), range(24, 1 << 20, 26)
"""Rows of it that remove their rule, or all of them."""

APPENDING = ("one", "two")
"""Operators that append each operation to its key's state."""
WALL_CLOCK = "wall-clock"
CLOCKED = {"event-clock": True, WALL_CLOCK: False}
"""Operators with timers and states that expire; True for timers in event time."""


@dataclass(frozen=True)
class TaskSpec:
    """One attempt, as Spark describes it to a worker."""

    query: str
    run: str
    operator: str
    batch: int
    slot: int
    stage: int
    attempt: int
    parallelism: int
    operations: Mapping[bytes, Sequence[int]]
    rules: Sequence[int] = ()

    def __str__(self) -> str:
        return f"{self.run} {self.operator} batch {self.batch} slot {self.slot} stage {self.stage} try {self.attempt}"

    @property
    def writer(self) -> bytes:
        """The attempt's name in the state of writers."""
        return f"{self.batch} {self.run} {self.operator} {self.attempt}".encode()

    @property
    def task(self) -> TaskAttempt:
        """The attempt, as the calls carry it."""
        return TaskAttempt(self.query, self.run, self.operator, self.batch, self.slot, self.stage, self.attempt)


class ConcurrentUpdate(Exception):
    """Another driver has written this entry of the query's log: Spark stops the query."""


class QueryLogs:
    """The offsets and commits of one query that are known to be written, and its endless source.

    The source's record ``i`` is the operation ``i`` on key ``key_of(i)``: the processor appends ``i`` to the key's
    state, so the right state after any batch is known, and shows every loss, repetition and disorder.

    Args:
        keys: Number of keys.
        max_parallelism: Number of key groups.

    Attributes:
        ends: Where each batch ends whose offsets are durable.
        committed: Number of the batches whose commits are durable.
        lost: Batches whose effects a query has lost that was told to go on without.
        planned: By run, the last batch that it has planned and where that ends.
        deferring: Runs whose commits wait for the next offsets.
    """

    def __init__(self, keys: int, max_parallelism: int) -> None:
        self.keys = keys
        self.max_parallelism = max_parallelism
        self.ends: list[int] = []
        self.planned: dict[str, tuple[int, int]] = {}
        self.deferring: set[str] = set()
        self.committed = 0
        self.lost: set[int] = set()
        self._changed = asyncio.Event()
        self._states: dict[int, dict[Key, bytes]] = {}

    def commit(self, batches: int) -> None:
        """So many batches are committed for good."""
        if batches > self.committed:
            self.committed = batches
            self._changed.set()

    def lose(self, batches: Iterable[int]) -> None:
        """What these batches did to the state is lost."""
        self.lost.update(batches)
        self._states.clear()

    async def reach(self, batches: int, seconds: float) -> bool:
        """Wait until so many batches are committed, for so many seconds at most; returns whether they are."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while self.committed < batches:
                    self._changed.clear()
                    await self._changed.wait()
        return self.committed >= batches

    def range_of(self, batch: int, run: str = "") -> range:
        """Return the operations of a batch: as a run has planned it, where nobody knows yet whether that is durable."""
        planned = self.planned.get(run)
        end = planned[1] if planned is not None and planned[0] == batch >= len(self.ends) else self.ends[batch]
        return range(self.ends[batch - 1] if batch else 0, end)

    def effects_of(self, batch: int) -> range:
        """Return the operations of a batch that the state has."""
        return range(0) if batch in self.lost else self.range_of(batch)

    def key_of(self, operation: int) -> Key:
        """Return the key that an operation appends to."""
        return b"key-%d" % ((operation * 2654435761 >> 5) % self.keys)

    def operations(self, batch: int, partition: int, parallelism: int, run: str) -> dict[Key, list[int]]:
        """Return what one task of a batch has to append, by key, in the order of the source."""
        found: dict[Key, list[int]] = {}
        for operation in self.range_of(batch, run):
            key = self.key_of(operation)
            group = key_group_of(key, self.max_parallelism)
            if partition_of(group, self.max_parallelism, parallelism) == partition:
                found.setdefault(key, []).append(operation)
        return found

    def rules_of(self, batch: int, run: str) -> list[int]:
        """Return the rows of the broadcast stream in a batch; some batches have none."""
        return rules_in(self.range_of(batch, run))

    def rules_after(self, batch: int) -> Mapping[int, bytes]:
        """Return the broadcast state after a batch, -1 for the empty one: for each rule, the operations behind it."""
        rules: dict[int, bytes] = {}
        for operation in chain.from_iterable(self.effects_of(each) for each in range(batch + 1)):
            if rules_in([operation]):
                rules[rule_of(operation)] = rules.get(rule_of(operation), b"") + encode_value([operation])
            if operation in RULE_GOES:
                del rules[rule_of(operation)]
            if operation in RULES_GO:
                rules.clear()
        return rules

    def state_after(self, batch: int) -> Mapping[Key, bytes]:
        """Return the state of each key after a batch; -1 for the empty one."""
        if batch < 0:
            return {}
        if batch not in self._states:
            state = dict(self.state_after(batch - 1))
            for operation in self.effects_of(batch):
                key = self.key_of(operation)
                state[key] = state.get(key, b"") + encode_value([operation])
            self._states[batch] = state
        return self._states[batch]


def key_group_of(key: Key, max_parallelism: int) -> int:
    """Return the key group of a key: any fixed function does."""
    return number_of(key) * 7 % max_parallelism


def number_of(key: Key) -> int:
    """Return the number of a key."""
    return int(key[4:])


def rules_in(operations: Iterable[int]) -> list[int]:
    """Return those of a batch's operations that are rows of the broadcast stream, too."""
    return [operation for operation in operations if operation % _RULES_EVERY == 0]


def rule_of(operation: int) -> int:
    """Return the rule that a row of the broadcast stream changes."""
    return operation % _RULES


def keys_of(logs: QueryLogs) -> Sequence[Key]:
    """Return every key there is."""
    return [b"key-%d" % number for number in range(logs.keys)]


def first_keys(logs: QueryLogs, batch: int) -> Sequence[Key]:
    """Return the keys whose initial state comes with a batch: all with the first one."""
    return keys_of(logs) if batch == 0 else ()


def encode_value(operations: Sequence[int]) -> bytes:
    """Return operations as a state value; values join by being put one behind the other."""
    return struct.pack(f"<{len(operations)}I", *operations)


def decode_value(value: bytes) -> list[int]:
    """Return the operations in a state value."""
    return list(struct.unpack(f"<{len(value) // 4}I", value))


def decode_values(values: Mapping[int, bytes]) -> dict[int, list[int]]:
    """Return the operations in the values of some rules."""
    return {rule: decode_value(value) for rule, value in sorted(values.items())}
