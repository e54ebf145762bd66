"""Broadcast state: a map that every partition of an operator reads, and that its broadcast streams write.

Each partition applies the same rows to the same prior content, so each comes to the same map without asking another.
One of them hands its writes to the log; all tell the digest of theirs, and the coordinator compares them.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, ClassVar

import pyarrow as pa

from dstl.errors import Invalid
from dstl.state.broadcast_copies import ReadWhole
from dstl.state.call_error import StateCallError
from dstl.state.codec.key_codec import KeyCodec
from dstl.state.codec.value_codec import ValueCodec
from dstl.state.descriptor import StateDescriptor
from dstl.state.map_state import MapState
from dstl.state.overlay import Overlay
from dstl.state.source import Entry, StateSource
from dstl.state.task_input import KeyWindow
from dstl.state.ttl import TimeToLive

__all__ = ["BROADCAST_KEY_GROUP", "BroadcastScope", "BroadcastState"]

BROADCAST_KEY_GROUP = 0
"""The key group that a job's only copy lies in, whatever its parallelism; its partition is always the first."""

_KEY = b""
"""Stands where a grouping key would: no key of a row is empty."""


class BroadcastScope:
    """The writes of one task to all its broadcast states, and when they may be made.

    Attributes:
        window: The one place that broadcast states have; no state can be used before :meth:`open`.
        overlay: What this task has written.
        stream: The broadcast stream whose rows are being handled; None while there is none, and nothing may be written.
    """

    def __init__(self) -> None:
        self.window = KeyWindow()
        self.window.forward = False
        self.overlay = Overlay()
        self.stream: str | None = None

    def open(self) -> None:
        """Let the states be used."""
        self.window.keys, self.window.key_groups, self.window.index = [_KEY], [BROADCAST_KEY_GROUP], 0

    def close(self) -> Iterator[pa.RecordBatch]:
        """Let the states be used no more, and return the writes as batches of ``CHANGE_SCHEMA``."""
        self.window.keys, self.window.key_groups, self.window.index = (), (), -1
        return iter(self.overlay.drain())


class BroadcastState(MapState):
    """A map of tuples to tuples, the same for all grouping keys; ``handle.getBroadcastState`` returns it.

    It has the methods of PySpark's ``MapState``. Those that write can be called in ``handleBroadcastRows`` alone.
    """

    whole_bytes: ClassVar[int] = 8 << 20
    """It is read whole up to this size, once a batch by each process that looks at it; a larger one entry by entry."""

    def __init__(
        self,
        descriptor: StateDescriptor,
        codec: ValueCodec,
        source: StateSource,
        scope: BroadcastScope,
        user_keys: KeyCodec,
        read: ReadWhole | None = None,
    ) -> None:
        super().__init__(descriptor, codec, scope.window, TimeToLive(0, 0), source, scope.overlay, user_keys)
        self._scope = scope
        self._read = read

    def updateValue(self, key: tuple[Any, ...], value: tuple[Any, ...]) -> None:
        """Set the value of a user key.

        Raises:
            StateCallError: Called elsewhere than in ``handleBroadcastRows``, or not with tuples of the state's schemas.
        """
        self._check_writable("updating broadcast state value")
        super().updateValue(key, value)

    def removeKey(self, key: tuple[Any, ...]) -> None:
        """Remove a user key; nothing happens where it is not there. Errors as above."""
        self._check_writable("removing key from broadcast state")
        super().removeKey(key)

    def clear(self) -> None:
        """Remove all entries. Errors as above."""
        self._check_writable("clearing broadcast state")
        super().clear()

    def _fetch(self, index: int) -> list[Entry] | None:
        if self._read is None:
            return super()._fetch(index)
        return self._read(self.descriptor.state_id, partial(super()._fetch, index))

    def _check_writable(self, doing: str) -> None:
        if self._scope.stream is None:
            name = self.descriptor.name
            raise StateCallError(
                doing,
                Invalid(
                    f"broadcast state {name!r} is written in handleBroadcastRows only, where every partition makes the "
                    "same change: keep what belongs to one key in a state of its own (getValueState, getMapState)"
                ),
            )
