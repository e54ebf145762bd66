"""The contract of state tables: opaque bytes by (key group, state, key, user key), in bulk.

A value state keeps one entry per key, under the empty user key; list and map states keep one entry per
element. The table knows nothing of codecs, schemas or time.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from dstl.errors import Invalid
from handles.key_group import KeyGroup

ENTRY_SCHEMA = pa.schema(
    [
        pa.field("state", pa.uint16(), nullable=False),
        pa.field("key", pa.binary(), nullable=False),
        pa.field("user_key", pa.binary(), nullable=False),
        pa.field("value", pa.binary(), nullable=False),
    ]
)
"""Columns of a page: a part of one key group, ordered by state, key, user key, no entry twice."""

PAGE_ROWS = 1 << 14  # rows of one block of a base file, each with 14 bytes of its own
PAGE_BYTES = 4 << 20  # decoded and encoded at once, so held by each reader and writer

KeyGroups = Sequence[int] | npt.NDArray[np.integer]

ExpiredValue = Callable[[bytes], bool]
"""Says whether a stored value has expired: then its entry is dropped."""

Expired = Mapping[int, ExpiredValue]
"""By state id, the test that says of a stored value that its time to live has passed. States without one are
kept whole and cost nothing."""


class StateEntry(NamedTuple):
    """One entry of a known state and key group."""

    key: bytes
    user_key: bytes
    value: bytes


@dataclass(frozen=True, slots=True)
class TableSize:
    """The size of a table.

    Attributes:
        entries: Number of entries, counting each element of a list or map.
        bytes: Bytes of keys, user keys and values together, without any overhead of the table: what a full
            materialization writes before compression, and so the figure to compare the log's bytes with.
    """

    entries: int
    bytes: int


@dataclass(frozen=True, slots=True)
class SnapshotFile:
    """One file of a snapshot.

    Attributes:
        name: File name in the snapshot's directory.
        size: In bytes.
        checksum: CRC-32C of the file.
        id: Of a file that never changes, and that later snapshots may name again: equal ids are equal bytes, whichever
            table has the file. Empty for the others, which are small.
    """

    name: str
    size: int
    checksum: int
    id: str = ""


class TableSnapshot(Protocol):
    """One moment of a table, unaffected by what is written afterwards.

    Made by the table's thread; read by one other thread at a time; independent of the table's end. It must be
    closed, for until then it pins memory (heap) or disk (RocksDB).
    """

    @property
    def versions(self) -> Mapping[KeyGroup, int]:
        """Version of each key group at that moment; see :meth:`StateTable.version`."""

    def entries(self, key_group: KeyGroup) -> Iterator[pa.RecordBatch]:
        """Yield one key group's entries as pages of :data:`ENTRY_SCHEMA`, in the order it names.

        A page holds at most :data:`PAGE_ROWS` entries and :data:`PAGE_BYTES` bytes, but always at least one entry.

        Raises:
            Closed: The snapshot was closed.
        """

    def close(self) -> None:
        """Release what the snapshot pins. Idempotent, from any thread."""


class StateTable(ABC):
    """The committed state of one operator in one TaskManager.

    Invariants:
        1. One thread (the TaskManager's loop) makes all calls; only a :class:`TableSnapshot` may be read by
           another.
        2. The table holds committed state alone: pending overlays are folded in by :meth:`apply`.
        3. ``apply`` is idempotent, so a batch that was replayed in part may be replayed whole.
        4. Within a batch the order of a key's changes counts; changes of different keys have no order.
        5. Versions of key groups only grow, over the table's whole life.

    A key group that was never written or restored is simply empty: who owns what is the TaskManager's
    business. What a table in files alone can do, or one in memory, is said there.
    """

    has_failed = False
    """True once the disk has failed it: it may take nothing any more, and must be restored into another table."""

    def __init__(self) -> None:
        self._versions: dict[KeyGroup, int] = {}
        self._clock = 0

    @abstractmethod
    def get_many(self, state: int, key_groups: KeyGroups, keys: Sequence[bytes]) -> list[bytes | None]:
        """Return the value under the empty user key of each key, None where there is none.

        Args:
            state: State id in ``[0, 65536)``.
            key_groups: One per key. Fastest when equal key groups stand together.
            keys: Keys, in any order, possibly repeated.

        Raises:
            Invalid: The lengths differ.
        """

    def get_values(self, state: int, key_groups: KeyGroups, keys: pa.Array) -> pa.Array:
        """Return what :meth:`get_many` does as a binary column, null where there is no value.

        Args:
            state: State id in ``[0, 65536)``.
            key_groups: One per key. Fastest when equal key groups stand together.
            keys: Binary, without nulls.

        Raises:
            Invalid: The lengths differ.
        """
        return pa.array(self.get_many(state, key_groups, keys.to_pylist()), pa.binary())

    @abstractmethod
    def get_entries(self, state: int, key_groups: KeyGroups, keys: Sequence[bytes]) -> list[list[tuple[bytes, bytes]]]:
        """Return all (user key, value) of each key, in user key order; an empty list where there is none."""

    @abstractmethod
    def get_entry(self, state: int, key_group: KeyGroup, key: bytes, user_keys: Sequence[bytes]) -> list[bytes | None]:
        """Return the values of some user keys of one key, None where there is none."""

    @abstractmethod
    def scan(
        self,
        state: int,
        key_group: KeyGroup,
        *,
        after: tuple[bytes, bytes] | None = None,
        before_key: bytes | None = None,
        limit: int = PAGE_ROWS,
    ) -> list[StateEntry]:
        """Return a page of one state's entries in one key group, ordered by key, then user key.

        Args:
            state: State id.
            key_group: Key group.
            after: Last (key, user key) already seen: the page starts behind it. None: from the beginning.
            before_key: Only keys below this one: exclusive. None: no bound.
            limit: Most entries returned; fewer mean that the end was reached.

        Writes between two pages are seen or not, but never make an untouched entry appear twice or not at
        all.
        """

    @abstractmethod
    def apply(self, changes: pa.RecordBatch) -> None:
        """Apply change records (``CHANGE_SCHEMA`` of ``dstl.changelog.change_set``: put, delete, clear), in
        bulk.

        Used for committed overlays and for replay. Nothing is applied when the batch is refused.

        Raises:
            Invalid: A metadata record, an unknown operation, or a null.
        """

    def prepare_snapshot(self) -> None:
        """Do now what would make the next :meth:`snapshot` slow (flush), from any thread. Never needed."""
        self._check_open()

    @abstractmethod
    def snapshot(self) -> TableSnapshot:
        """Return this moment of the table: the synchronous part of a materialization.

        Raises:
            Unavailable: A key group is cold.
        """

    @abstractmethod
    def restore(self, key_group: KeyGroup, pages: Iterable[pa.RecordBatch]) -> None:
        """Replace one key group by the entries of some pages, in bulk.

        The pages must be in the order of :data:`ENTRY_SCHEMA`, as :meth:`TableSnapshot.entries` gives them. Their
        memory is the table's afterwards, which may write there: they are not read again.

        When ``pages`` raises, the key group is left as it was (heap) or empty (RocksDB): restore it again.

        Raises:
            Invalid: A page is not of that schema; RocksDB also refuses another order.
        """

    @abstractmethod
    def drop_key_group(self, key_group: KeyGroup) -> None:
        """Forget one key group, for another TaskManager owns it now."""

    def drop_expired(self, key_group: KeyGroup, expired: Expired) -> Iterator[int]:
        """Delete the expired entries of one key group in pieces of a millisecond or so, and yield after each how many
        it has deleted. Between two of them the table may be used in every way; what is written then may be missed.

        It is not a change: it need not be logged, because replay brings back entries that are expired still,
        and it does not raise the version.
        """
        self._check_open()
        return self._dropped(key_group, expired)

    def key_groups(self) -> Sequence[KeyGroup]:
        """Return the key groups that were written or restored and not dropped, in ascending order."""
        return sorted(self._versions)

    def version(self, key_group: KeyGroup) -> int:
        """Return a number that grows with each change of the key group; 0 if it was never touched.

        Equal versions of one table object mean equal content (but for expired entries): a materialization
        uploads only key groups whose version differs from that of the last base.
        """
        return self._versions.get(key_group, 0)

    @abstractmethod
    def size(self) -> TableSize:
        """Return how much the table holds; cheap enough for every batch."""

    @abstractmethod
    def close(self) -> None:
        """Release memory and files. Idempotent; snapshots taken before stay readable."""

    @abstractmethod
    def _check_open(self) -> None:
        """Raise Closed where it was closed."""

    @abstractmethod
    def _dropped(self, key_group: KeyGroup, expired: Expired) -> Iterator[int]:
        """Do what :meth:`drop_expired` says."""

    def _check_addresses(self, key_groups: KeyGroups, keys: Sized) -> None:
        self._check_open()
        if len(key_groups) != len(keys):
            raise Invalid(f"{len(key_groups)} key groups for {len(keys)} keys: one each is needed")

    def _touch(self, key_group: KeyGroup) -> None:
        self._clock += 1
        self._versions[key_group] = self._clock
