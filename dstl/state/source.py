"""The source of prior state: the parent checkpoint's content as one task sees it, and the keys it has in hand."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from dstl.rpc.messages import ExpiryPlace

Entry = tuple[bytes, bytes]
"""User key and value."""

Timer = tuple[int, bytes, bytes]
"""Key group, grouping key and user key (the expiry, eight bytes that sort as the time does)."""


class StateSource(Protocol):
    """Reads of one operator's state, in bulk. One task's own; not thread-safe.

    Its content does not change while the task runs: the parent checkpoint, without the task's own writes. Sequences
    given together are of one length and belong together. Values are opaque bytes and never None; a missing one is None.
    """

    def fetch_many(
        self, states: Sequence[int], key_groups: Sequence[int], keys: Sequence[bytes]
    ) -> list[list[bytes | None]]:
        """Return, for each point state, the values of all keys: one round trip."""
        ...

    def fetch_values(self, state: int, key_groups: npt.NDArray[np.uint16], keys: pa.Array) -> pa.Array:
        """Return the values of all keys of one point state as a binary array, null where there is none.

        Args:
            state: The state's number.
            key_groups: One per key; fastest when they are sorted.
            keys: Binary, without nulls, each key once.
        """
        ...

    def fetch_entries(
        self, state: int, key_groups: Sequence[int], keys: Sequence[bytes], max_bytes: int
    ) -> list[list[Entry] | None]:
        """Return all entries of each key in the order of their user keys' bytes, in one round trip.

        A key whose entries have more than ``max_bytes`` together is None: it is then read piece by piece. The source
        may also answer None for keys at the end once the reply itself has grown to several times ``max_bytes``, but
        never for a key that fits when it is asked for alone.
        """
        ...

    def fetch_entry(self, state: int, key_group: int, key: bytes, user_keys: Sequence[bytes]) -> list[bytes | None]:
        """Return the values of some user keys of one key."""
        ...

    def scan_entries(self, state: int, key_group: int, key: bytes, after: bytes | None, max_bytes: int) -> list[Entry]:
        """Return the next entries of one key in user-key order, strictly after ``after`` (None: from the first).

        At least one if there is one; about ``max_bytes`` at most. Empty at the end.
        """
        ...

    def scan_timers(
        self, state: int, key_groups: Sequence[int], until: bytes, after: Timer | None, limit: int
    ) -> list[Timer]:
        """Return the next timers whose user key is at or below ``until``, ordered by (user key, key group, key).

        Args:
            state: The timers' state.
            key_groups: The key groups of the partition.
            until: Highest user key, included.
            after: Last timer of the page before; None for the first page.
            limit: Most timers to return; fewer mean that there are no more.
        """
        ...

    def fetch_due(
        self, state: int, key_groups: Sequence[int], place: ExpiryPlace, until: int, *, with_values: bool
    ) -> Iterator[pa.RecordBatch]:
        """Yield the entries of a point state that are due: key group, key and value, each entry once.

        Args:
            state: The state's number.
            key_groups: Where to look.
            place: Where an entry's time stands.
            until: Due is a time at or below this; its unit is that of the entries.
            with_values: Whether values are wanted; without, they are empty.
        """
        ...

    def scan_values(self, state: int, key_groups: Sequence[int]) -> Iterator[pa.RecordBatch]:
        """Yield all entries of a point state in some key groups: key group, key and value, each entry once."""
        ...


class KeyWindow:
    """The keys that a task has in hand at a time, shared by all states of its operator.

    They are the distinct keys of one Arrow batch, or of one page of expired timers. The states of all are fetched
    together, and one assignment to :attr:`index` switches to the next key.

    Attributes:
        index: Position of the current key; -1 while there is none.
        keys: Bytes of the keys, each once.
        key_groups: Their key groups.
        forward: Keys become current in their order, each once; what was read for earlier ones can be let go.
    """

    def __init__(self) -> None:
        self.index = -1
        self.keys: Sequence[bytes] = ()
        self.key_groups: Sequence[int] = ()
        self.forward = True
