"""The grouping keys that a task has in hand at a time, and which of them is the current one.

A window is the distinct keys of one Arrow batch (or of one page of expired timers). The states of all its keys are
fetched together; switching to the next key is one assignment to :attr:`KeyWindow.index`.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["KeyWindow"]


class KeyWindow:
    """Keys in hand, shared by all states of an operator.

    Attributes:
        index: Position of the current key; -1 while there is none.
        keys: Bytes of the keys, each once.
        key_groups: Their key groups.
        forward: Keys become current in their order, each once; what was read for earlier ones can be let go.
    """

    __slots__ = ("forward", "index", "key_groups", "keys")

    def __init__(self) -> None:
        self.index = -1
        self.keys: Sequence[bytes] = ()
        self.key_groups: Sequence[int] = ()
        self.forward = True
