"""``ValueState``, which holds one tuple for each grouping key, and the base of all states with one value per key."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import compress
from typing import Any, Protocol

from pyspark.sql.streaming import stateful_processor

from dstl.errors import Invalid
from dstl.state.descriptor import DeclaredState
from dstl.state.key_window import KeyWindow
from dstl.state.overlay import Overlay
from dstl.state.processor_errors import StateCallError, why_unusable


class PointState:
    """Holds one value per key. The window's values are slots in a list, so that a read is one index and no look-up.

    Args:
        declared: The state.
        window: The keys in hand.
    """

    def __init__(self, declared: DeclaredState, window: KeyWindow) -> None:
        self.descriptor = declared.descriptor
        self._window = window
        self._ttl = declared.ttl
        self._encode = declared.codec.encode
        self._decode = declared.codec.decode
        self._decode_many = declared.codec.decode_many
        self._slots: list[Any] = []
        """Of each key its value: as bytes, as a tuple where it was quick to decode, or None."""
        self._dirty = bytearray()
        self._deleted = False

    def retire(self) -> None:
        """Refuse every use from now on; the handle opens no window of a deleted state."""
        self._deleted = True

    def open_window(self, values: list[bytes | None], overlay: Overlay) -> None:
        """Take the prior values of the window's keys."""
        for i in self._ttl.find_expired(values):
            values[i] = None
        self._dirty = bytearray(len(values))
        overlay.overlay_values(self.descriptor.state_id, self._window.keys, values)
        self._slots = self._decode_many(values)

    def close_window(self, overlay: Overlay) -> None:
        """Give what was written to the overlay; the window's values are forgotten."""
        dirty = self._dirty
        if any(dirty):
            columns: list[Sequence[Any]] = [self._window.key_groups, self._window.keys, self._slots]
            if not all(dirty):
                columns = [list(compress(column, dirty)) for column in columns]
            overlay.put_values(self.descriptor.state_id, *columns)
        self._slots = []
        self._dirty = bytearray()

    def unusable(self, doing: str) -> StateCallError:
        """Return the error for a state that was deleted, or is used where there is no grouping key."""
        return StateCallError(doing, why_unusable(self.descriptor.name, deleted=self._deleted))


class ValueState(PointState, stateful_processor.ValueState):  # type: ignore[misc]
    """PySpark's ``ValueState`` over DSTL; ``handle.getValueState`` returns it."""

    def exists(self) -> bool:
        """Return True where the current key has a value."""
        try:
            return self._slots[self._window.index] is not None
        except IndexError:
            raise self.unusable("checking value state exists") from None

    def get(self) -> tuple[Any, ...] | None:
        """Return the current key's value, or None."""
        try:
            value: Any = self._slots[self._window.index]
        except IndexError:
            raise self.unusable("getting value state") from None
        return self._decode(value) if value.__class__ is bytes else value

    def update(self, newValue: tuple[Any, ...]) -> None:
        """Replace the current key's value.

        Raises:
            StateCallError: Not a tuple of the state's schema; names the state and the field.
        """
        try:
            data = self._encode(newValue)
        except Invalid as error:
            raise StateCallError("updating value state", error) from None
        index = self._window.index
        try:
            self._slots[index] = data
        except IndexError:
            raise self.unusable("updating value state") from None
        self._dirty[index] = 1

    def clear(self) -> None:
        """Remove the current key's value."""
        index = self._window.index
        try:
            self._slots[index] = None
        except IndexError:
            raise self.unusable("clearing value state") from None
        self._dirty[index] = 1


ReduceFunction = Callable[[tuple[Any, ...], tuple[Any, ...]], tuple[Any, ...]]
"""Two tuples to one, associative; the first is what was reduced so far."""


class AggregateFunction(Protocol):
    """A function that folds values into an accumulator and makes a result of it. The methods are PyFlink's."""

    def create_accumulator(self) -> tuple[Any, ...]:
        """Return the accumulator of nothing."""

    def add(self, value: Any, accumulator: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the accumulator with one more value."""

    def get_result(self, accumulator: tuple[Any, ...]) -> Any:
        """Return the result of an accumulator."""


class ReducingState(ValueState):
    """A state that folds what is added into one tuple; ``handle.getReducingState`` returns it."""

    def __init__(self, declared: DeclaredState, window: KeyWindow, function: ReduceFunction) -> None:
        super().__init__(declared, window)
        # PyFlink's reduce functions are objects with this method.
        self._function: ReduceFunction = getattr(function, "reduce", function)

    def add(self, value: tuple[Any, ...]) -> None:
        """Fold one tuple into the current key's value.

        Raises:
            Invalid: What the function returned is not a tuple of the state's schema.
        """
        before = self.get()
        self.update(value if before is None else self._function(before, value))


class AggregatingState(ValueState):
    """A state that folds what is added into an accumulator; ``handle.getAggregatingState`` returns it."""

    def __init__(self, declared: DeclaredState, window: KeyWindow, function: AggregateFunction) -> None:
        super().__init__(declared, window)
        self._function = function

    def add(self, value: Any) -> None:
        """Fold one value into the current key's accumulator.

        Raises:
            Invalid: The function's accumulator is not a tuple of the state's schema.
        """
        accumulator = ValueState.get(self)
        if accumulator is None:
            accumulator = self._function.create_accumulator()
        self.update(self._function.add(value, accumulator))

    def get(self) -> Any:
        """Return the result for the current key, None where nothing was added."""
        accumulator = ValueState.get(self)
        return None if accumulator is None else self._function.get_result(accumulator)
