"""``ListState``: a list of tuples for each grouping key. Appending reads nothing.

An element is an entry whose user key is ``u64 sequence of the batch | u32 number within the list and batch``,
big-endian: the order of the bytes is the order of the appends and a new element never needs the length of the list. The
number knows nothing of other keys, for a shuffle delivers keys in another order to each attempt at a task.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import Any

from pyspark.sql.streaming import stateful_processor

from dstl.errors import Invalid
from dstl.state.descriptor import DeclaredState
from dstl.state.entry_state import EntryState, StateAccess
from dstl.state.processor_errors import StateCallError

MAX_NUMBER = (1 << 32) - 1
"""The largest number of an element within its batch."""

_ELEMENT = struct.Struct(">QI")


def element_user_key(sequence: int, number: int) -> bytes:
    """Return the user key of a list's element: the bytes sort as (the batch's number, the one within it) does."""
    return _ELEMENT.pack(sequence, number)


class ListState(EntryState, stateful_processor.ListState):  # type: ignore[misc]
    """PySpark's ``ListState`` over DSTL; ``handle.getListState`` returns it."""

    def __init__(self, declared: DeclaredState, access: StateAccess, sequence: int) -> None:
        EntryState.__init__(self, declared.descriptor, access, declared.ttl)
        self._encode = declared.codec.encode
        self._decode = declared.codec.decode
        self._sequence = sequence

    def exists(self) -> bool:
        """Return True where the current key's list has an element."""
        try:
            return self._any()
        except Invalid as error:
            raise StateCallError("checking value state exists", error) from None

    def get(self) -> Iterator[tuple[Any, ...]]:
        """Iterate over the current key's list as it is now."""
        decode = self._decode
        try:
            items = self._items()
        except Invalid as error:
            raise StateCallError("getting value state", error) from None
        return (decode(value) for _, value in items)

    def put(self, newState: Sequence[tuple[Any, ...]]) -> None:
        """Replace the current key's list; an empty one clears it.

        Raises:
            StateCallError: An element is not a tuple of the state's schema; nothing was changed.
        """
        try:
            encoded = self._encode_all(newState)
            self._clear()
            self._append(encoded)
        except Invalid as error:
            raise StateCallError("updating value state", error) from None

    def appendValue(self, newState: tuple[Any, ...]) -> None:
        """Append one element.

        Raises:
            StateCallError: Not a tuple of the state's schema.
        """
        try:
            self._append([self._encode(newState)])
        except Invalid as error:
            raise StateCallError("updating value state", error) from None

    def appendList(self, newState: Sequence[tuple[Any, ...]]) -> None:
        """Append elements in their order.

        Raises:
            StateCallError: An element is not a tuple of the state's schema; nothing was appended.
        """
        try:
            self._append(self._encode_all(newState))
        except Invalid as error:
            raise StateCallError("updating value state", error) from None

    def clear(self) -> None:
        """Remove the current key's list."""
        try:
            self._clear()
        except Invalid as error:
            raise StateCallError("clearing value state", error) from None

    def _encode_all(self, elements: Any) -> list[bytes]:
        if isinstance(elements, (str, bytes, dict)) or not hasattr(elements, "__iter__"):
            raise Invalid(f"state {self.descriptor.name!r} takes a list of tuples, not {type(elements).__name__}")
        return [self._encode(element) for element in elements]

    def _append(self, encoded: list[bytes]) -> None:
        for value in encoded:
            self._put(element_user_key(self._sequence, self._next_number()), value)
