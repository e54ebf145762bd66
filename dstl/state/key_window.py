"""The keys that a task has in hand at a time."""

from __future__ import annotations

from collections.abc import Sequence


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
