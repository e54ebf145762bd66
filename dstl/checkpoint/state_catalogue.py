"""The states of each operator: settled by the driver when a run opens, told to its tasks, kept by its checkpoints.

An operator finds its state again by its name and by the names of its key columns: types alone would let it take
another operator's.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from dstl.errors import Invalid
from handles.checkpoint import CompletedCheckpoint, OperatorEntry


def check_key_columns(declared: Mapping[str, Sequence[str]], stored: Mapping[str, OperatorEntry]) -> None:
    """Refuse an operator that groups by other columns than its checkpoint does.

    Upper and lower case count as the same, as they do to Spark.

    Args:
        declared: The key columns of the query's operators, by operator.
        stored: The operators of the checkpoint, by name.

    Raises:
        Invalid: Says who groups by what, and what to do.
    """
    held = {uid: key_columns(entry) for uid, entry in stored.items()}
    for uid, wanted in declared.items():
        found = held.get(uid, ())
        if not wanted or not found or _fold_case(wanted) == _fold_case(found):
            continue
        owners = [other for other, columns in held.items() if _fold_case(columns) == _fold_case(wanted)]
        elsewhere = f"; operator {owners[0]!r} of the checkpoint groups by ({', '.join(wanted)})" if owners else ""
        renaming = "".join(
            f".withColumnRenamed({new!r}, {old!r})"
            for old, new in zip(found, wanted, strict=False)
            if old.casefold() != new.casefold()
        )
        raise Invalid(
            f"operator {uid!r} groups by ({', '.join(wanted)}), but its checkpoint by ({', '.join(found)}){elsewhere}. "
            "If operators have changed places, pass each the name= under which its state is stored; if this is "
            "another operator, give it a name of its own; if a column was renamed, group by the old name: "
            f"df{renaming}"
        )


def key_columns(entry: OperatorEntry) -> tuple[str, ...]:
    """Return the names of an operator's key columns; empty where its checkpoint does not have them."""
    try:
        return tuple(str(field["name"]) for field in json.loads(entry.registry["key"])["fields"])
    except (KeyError, TypeError, ValueError):
        # It has no state yet, or is damaged: who reads the registry says so.
        return ()


def _fold_case(names: Sequence[str]) -> list[str]:
    return [name.casefold() for name in names]


Follows = Literal["operator", "spark"]
"""Whose watermark an operator goes by: the one that all with a watermark of their own share, or Spark's."""

Registry = Mapping[str, Any]
"""The states of one operator as plain data; ``dstl.state`` owns its meaning."""


@dataclass(frozen=True, slots=True)
class ExpectedOperator:
    """A stateful operator of the query: every batch has to run it whole.

    Attributes:
        uid: Its name.
        parallelism: Its partitions.
        key_types: Types of its grouping columns.
        resolve: Returns its states, given those of the checkpoint that a run starts from, None where it has none;
            raises ``Invalid`` where they contradict each other.
        watermark_delay_ms: How far its own watermark stays behind the latest event time; None where it has none.
        key_columns: Names of its grouping columns; without them only their types are compared with a checkpoint's.
        follows: Whose watermark it goes by where it has event time and no watermark of its own.
        has_initial_state: Its first batch has rows of initial state.
    """

    uid: str
    parallelism: int
    key_types: str
    resolve: Callable[[Registry | None], Registry]
    watermark_delay_ms: int | None = None
    key_columns: Sequence[str] = ()
    follows: Follows | None = None
    has_initial_state: bool = False


class StateCatalogue:
    """The operators of a query and their states. Pure.

    Args:
        allow_non_restored_state: An operator of the checkpoint that the query no longer has is carried along instead
            of being refused.
    """

    def __init__(self, *, allow_non_restored_state: bool = False) -> None:
        self._allow_non_restored_state = allow_non_restored_state
        self._expected: dict[str, ExpectedOperator] = {}
        self._registries: dict[str, Registry] = {}
        self._encoded: dict[str, bytes] = {}
        self._carried: tuple[OperatorEntry, ...] = ()

    @property
    def _delays(self) -> dict[str, int]:
        """By operator with a watermark of its own, how far that stays behind."""
        delays = {uid: each.watermark_delay_ms for uid, each in self._expected.items()}
        return {uid: delay for uid, delay in delays.items() if delay is not None}

    def expect(self, operator: ExpectedOperator) -> None:
        """Add an operator of the query.

        Raises:
            Invalid: It follows an operator that has not been added.
        """
        if operator.follows == "operator" and not self._delays:
            raise Invalid(
                f"operator {operator.uid!r} goes by the watermark of an operator before it, which is not one of this "
                "backend's: define both with one StateBackend"
            )
        self._expected[operator.uid] = operator

    def open(self, parent: CompletedCheckpoint | None) -> None:
        """Settle the states of a run, given the checkpoint that it starts from.

        Raises:
            Invalid: An operator is missing from the query, its key columns have other types or names, its states cannot
                follow the checkpoint's, or initial state would be given over that of a savepoint.
        """
        stored = {entry.uid: entry for entry in parent.operators} if parent else {}
        missing = [entry for uid, entry in stored.items() if uid not in self._expected]
        if missing and not self._allow_non_restored_state:
            raise Invalid(
                f"the checkpoint holds state of operator {missing[0].uid!r}, and the query only has "
                f"{', '.join(map(repr, self._expected))}: give the operator its old name, or pass "
                "allow_non_restored_state=True"
            )
        for uid, expected in self._expected.items():
            if uid in stored and stored[uid].key_types != expected.key_types:
                raise Invalid(
                    f"operator {uid!r} groups by ({expected.key_types}), but its checkpoint by "
                    f"({stored[uid].key_types}): group as before, or give the operator another name"
                )
            if uid in stored and expected.has_initial_state and parent is not None and parent.batch_id < 0:
                raise Invalid(
                    f"operator {uid!r}: its initialState would be given over its state from the savepoint, in the "
                    "first batch of a new checkpoint directory: leave it out"
                )
        check_key_columns({uid: each.key_columns for uid, each in self._expected.items()}, stored)
        known = {uid: entry.registry for uid, entry in stored.items() if entry.registry}
        self._registries = {uid: each.resolve(known.get(uid)) for uid, each in self._expected.items()}
        self._encoded = {uid: json.dumps(registry).encode() for uid, registry in self._registries.items()}
        self._carried = tuple(missing)

    def goes_by_spark(self, operator: str) -> bool:
        """Return True where the operator's watermark is Spark's."""
        return operator in self._expected and self._expected[operator].follows == "spark"

    def watermarks(self, ours_ms: int | None, sparks_ms: Mapping[str, int]) -> dict[str, int]:
        """Return, by operator with event time, the watermark that a batch goes by, Unix milliseconds.

        Args:
            ours_ms: That of the checkpoint before; None where there is none.
            sparks_ms: Spark's for the batch, of the operators that go by it.
        """
        delays = self._delays
        return {
            uid: (sparks_ms.get(uid) if each.follows == "spark" else ours_ms) or 0
            for uid, each in self._expected.items()
            if each.follows is not None or uid in delays
        }

    def registry_of(self, operator: str) -> bytes:
        """Return the states of an operator in the run that was opened, as JSON: each of its tasks is told."""
        return self._encoded[operator]

    def entries(
        self, event_times: Mapping[str, int], parent: CompletedCheckpoint | None
    ) -> tuple[list[OperatorEntry], int | None]:
        """Return every operator with its states and watermark, and the watermark that all go by, for a manifest.

        A watermark never falls: an operator's is at least the parent's, so it is the same when a batch runs again. All
        go by the lowest, as Spark's default policy has it, and an operator that has not seen a row yet holds it where
        it is. One that is only carried along does not: it will never see another row.

        Args:
            event_times: By operator, the latest event time of the batch, Unix milliseconds.
            parent: The checkpoint that the batch was run on; None for an empty state.

        Returns:
            The entries; the watermark for the next batch, Unix milliseconds, None where no operator has event time.
        """
        before = {entry.uid: entry.watermark_ms for entry in parent.operators} if parent else {}
        watermarks = {
            uid: max(before.get(uid) or 0, event_times[uid] - delay if uid in event_times else 0)
            for uid, delay in self._delays.items()
        }
        own = (
            OperatorEntry(
                uid=uid,
                parallelism=each.parallelism,
                key_types=each.key_types,
                registry=dict(self._registries[uid]),
                watermark_ms=watermarks.get(uid),
            )
            for uid, each in self._expected.items()
        )
        lowest = min(watermarks.values(), default=None)
        if parent is not None and parent.watermark_ms is not None:
            lowest = max(parent.watermark_ms, lowest or 0)
        return [*own, *self._carried], lowest
