"""``ReducingState`` and ``AggregatingState``, which Flink has and Spark lacks; they store the accumulator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from dstl.state.codec.value_codec import ValueCodec
from dstl.state.descriptor import StateDescriptor
from dstl.state.task_input import KeyWindow
from dstl.state.ttl import TimeToLive
from dstl.state.value_state import ValueState

__all__ = ["AggregateFunction", "AggregatingState", "ReduceFunction", "ReducingState"]

ReduceFunction = Callable[[tuple[Any, ...], tuple[Any, ...]], tuple[Any, ...]]
"""Two tuples to one, associative; the first is what was reduced so far."""


class AggregateFunction(Protocol):
    """A function that folds values into an accumulator and makes a result of it. The methods are PyFlink's."""

    def create_accumulator(self) -> tuple[Any, ...]:
        """Return the accumulator of nothing."""
        ...

    def add(self, value: Any, accumulator: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the accumulator with one more value."""
        ...

    def get_result(self, accumulator: tuple[Any, ...]) -> Any:
        """Return the result of an accumulator."""
        ...


class ReducingState(ValueState):
    """A state that folds what is added into one tuple; ``handle.getReducingState`` returns it."""

    def __init__(
        self,
        descriptor: StateDescriptor,
        codec: ValueCodec,
        window: KeyWindow,
        ttl: TimeToLive,
        function: ReduceFunction,
    ) -> None:
        super().__init__(descriptor, codec, window, ttl)
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

    def __init__(
        self,
        descriptor: StateDescriptor,
        codec: ValueCodec,
        window: KeyWindow,
        ttl: TimeToLive,
        function: AggregateFunction,
    ) -> None:
        super().__init__(descriptor, codec, window, ttl)
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
