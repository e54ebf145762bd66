"""A key group of a heap table whose base is not there yet: what its changes have taken away from that base."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import repeat

import numpy as np
import pyarrow as pa

from dstl.changelog.change_set import OP_CLEAR, OP_DELETE
from materializer.tables.columns import ChangeRun, is_all_empty, key_items, value_items
from materializer.tables.heap_group import HeapGroup
from materializer.tables.key_places import names_of


class ColdGroup:
    """The deletions in one cold key group. What was put lies in the table, and hides what the base has by being there.

    So the base may come later, whole or row by row, and the order in which it and the changes come does not matter.

    Attributes:
        is_changed: The key group has changes beyond its base.
    """

    def __init__(self) -> None:
        self.is_changed = False
        self._deleted: set[tuple[int, bytes, bytes]] = set()
        self._cleared: set[tuple[int, bytes]] = set()

    def note(self, run: ChangeRun) -> None:
        """Record changes that the table takes."""
        self.is_changed = True
        if run.ops is None:
            return
        user_keys: Sequence[bytes] | repeat[bytes] = run.user_keys if run.user_keys is not None else repeat(b"")
        for op, key, user_key in zip(run.ops, run.keys, user_keys, strict=False):
            if op == OP_DELETE:
                self._deleted.add((run.state, key, user_key))
            elif op == OP_CLEAR:
                self._cleared.add((run.state, key))

    def hides(self, state: int, key: bytes, user_key: bytes) -> bool:
        """Return whether an entry of the base is gone."""
        return (state, key) in self._cleared or (state, key, user_key) in self._deleted

    def put_below(self, content: HeapGroup, state: int, rows: pa.RecordBatch) -> None:
        """Put those rows of a base into a state that no change hides.

        Args:
            content: The state's entries, to be written.
            state: The state of all rows.
            rows: Columns ``key``, ``user_key`` and ``value``.
        """
        keys, values = key_items(rows.column("key")), rows.column("value")
        if not is_all_empty(rows.column("user_key")):
            user_keys = rows.column("user_key").to_pylist()
            for key, user_key, value in zip(names_of(keys), user_keys, values.to_pylist(), strict=True):
                held = content.elements_of(key).get(user_key) if user_key else content.get(key)
                if held is None and not self.hides(state, key, user_key):
                    content.put(key, user_key, value)
            return
        held_all = content.get_all(keys)
        missing = [
            at
            for at, (key, held) in enumerate(zip(names_of(keys), held_all, strict=True))
            if held is None and not self.hides(state, key, b"")
        ]
        if not missing:
            return
        if len(missing) < len(keys):
            values = values.take(pa.array(missing))
            keys = keys[missing] if isinstance(keys, np.ndarray) else [keys[at] for at in missing]
        content.put_all(keys, *value_items(values))

    def lay_over(self, base: dict[int, HeapGroup], above: Mapping[int, HeapGroup]) -> None:
        """Make the changes of the key group to its whole base.

        Args:
            base: By state, the base; may be written.
            above: By state, what the table has of the key group.
        """
        for state, key in self._cleared:
            if state in base:
                base[state].clear(key)
        for state, key, user_key in self._deleted:
            if state in base:
                base[state].delete(key, user_key)
        for state, content in above.items():
            if state in base:
                content.copy_into(base[state])
            else:
                base[state] = content
