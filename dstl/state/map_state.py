"""``MapState``: a map of tuples to tuples for each grouping key."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pyspark.sql.streaming import stateful_processor
from pyspark.sql.types import Row

from dstl.errors import Invalid
from dstl.rpc.state_client import Entry
from dstl.state.codec.key_codec import KeyCodec
from dstl.state.descriptor import DeclaredState
from dstl.state.entry_state import EntryState, StateAccess
from dstl.state.frames.row_reader import row_class
from dstl.state.processor_errors import StateCallError


class MapState(EntryState, stateful_processor.MapState):  # type: ignore[misc]
    """PySpark's ``MapState`` over DSTL; ``handle.getMapState`` returns it. Iteration is in user-key byte order.

    A user key of one column may be given as a bare string, as Spark takes one of a single character.
    """

    def __init__(self, declared: DeclaredState, access: StateAccess, user_keys: KeyCodec) -> None:
        EntryState.__init__(self, declared.descriptor, access, declared.ttl)
        self._encode = declared.codec.encode
        self._decode = declared.codec.decode
        self._encode_key = user_keys.encode
        self._decode_key = user_keys.decode
        self._row = row_class(tuple(declared.codec.schema.names))

    def exists(self) -> bool:
        """Return True where the current key's map has an entry."""
        try:
            return self._any()
        except Invalid as error:
            raise StateCallError("checking map state exists", error) from None

    def getValue(self, key: tuple[Any, ...]) -> Row | None:
        """Return the value of a user key (a ``Row``, as PySpark does), or None.

        Raises:
            StateCallError: Not a tuple of the user key's schema.
        """
        try:
            found = self._find(self._encode_key(key))
        except Invalid as error:
            raise StateCallError("getting value", error) from None
        return None if found is None else tuple.__new__(self._row, self._decode(found))

    def containsKey(self, key: tuple[Any, ...]) -> bool:
        """Return True where the map has this user key."""
        try:
            return self._find(self._encode_key(key)) is not None
        except Invalid as error:
            raise StateCallError("checking if map state contains key", error) from None

    def updateValue(self, key: tuple[Any, ...], value: tuple[Any, ...]) -> None:
        """Set the value of a user key.

        Raises:
            StateCallError: Not tuples of the state's schemas; names the state and the field.
        """
        try:
            self._put(self._encode_key(key), self._encode(value))
        except Invalid as error:
            raise StateCallError("updating map state value", error) from None

    def iterator(self) -> Iterator[tuple[tuple[Any, ...], tuple[Any, ...]]]:
        """Iterate over (user key, value) as the map is now."""
        decode_key, decode = self._decode_key, self._decode
        return ((decode_key(user_key), decode(value)) for user_key, value in self._list())

    def keys(self) -> Iterator[tuple[Any, ...]]:
        """Iterate over the user keys as the map is now."""
        decode_key = self._decode_key
        return (decode_key(user_key) for user_key, _ in self._list())

    def values(self) -> Iterator[tuple[Any, ...]]:
        """Iterate over the values as the map is now."""
        decode = self._decode
        return (decode(value) for _, value in self._list())

    def removeKey(self, key: tuple[Any, ...]) -> None:
        """Remove a user key; nothing happens where it is not there."""
        try:
            self._put(self._encode_key(key), None)
        except Invalid as error:
            raise StateCallError("removing key from map state", error) from None

    def clear(self) -> None:
        """Remove the current key's map."""
        try:
            self._clear()
        except Invalid as error:
            raise StateCallError("clearing map state", error) from None

    def _list(self) -> Iterator[Entry]:
        try:
            return self._items()
        except Invalid as error:
            raise StateCallError("getting map state entries", error) from None
