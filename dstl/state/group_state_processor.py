"""The function of ``applyInPandasWithState`` as a processor: one state and one timeout for each key."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, ClassVar

import pandas as pd
from pyspark.sql import Row
from pyspark.sql.streaming.state import GroupState, GroupStateTimeout
from pyspark.sql.streaming.stateful_processor import StatefulProcessor
from pyspark.sql.types import StructType

from dstl.state.handle import TimeModeName
from dstl.state.keyed_batch import Style

GroupFunction = Callable[[Any, Iterator[pd.DataFrame], GroupState], Iterable[pd.DataFrame]]

TIME_MODES: dict[str, TimeModeName] = {
    GroupStateTimeout.NoTimeout: "none",
    GroupStateTimeout.ProcessingTimeTimeout: "processingTime",
    GroupStateTimeout.EventTimeTimeout: "eventTime",
}
"""The time mode in which a timeout's timers fire."""
TIMEOUT_COLUMN = "timeoutTimestamp"
"""Of initial state: when the key times out, as Spark's reader of state names it."""


class GroupStateProcessor(StatefulProcessor):  # type: ignore[misc]
    """Calls the function as Spark does: for a key with rows, and for one that has timed out and has none.

    The function is given PySpark's own ``GroupState``. As in Spark a timeout is over with the next call of its key,
    which may set another one.

    Args:
        function: The user's.
        schema: Columns of the state.
        timeout: PySpark's name of the kind of timeout.
    """

    _dstl_initial_style: ClassVar[Style] = "row"
    """In a frame, a null beside numbers is NaN, and makes floats of the whole ones."""

    def __init__(self, function: GroupFunction, schema: StructType, timeout: str) -> None:
        self._function = function
        self._schema = schema
        self._timeout = timeout

    def init(self, handle: Any) -> None:
        """Declare the state."""
        self._handle = handle
        self._state = handle.getValueState("state", self._schema)
        self._begun: Any = None

    def handleInitialState(self, key: Any, initialState: Row, timerValues: Any) -> None:
        """Take over a key's state, and its timeout from a column of Spark's name of it."""
        if key == self._begun:
            raise ValueError("initialState has two rows of one key: it has one state")
        self._begun = key
        row = initialState.asDict()
        timeout = row.get(TIMEOUT_COLUMN)
        state = self._group_state(timerValues, False)
        if any(row[name] is not None for name in self._schema.names):
            state.update(tuple(row[name] for name in self._schema.names))
        if timeout is not None and timeout > 0:
            state._timeout_timestamp = int(timeout)
        self._keep(state)

    def handleInputRows(self, key: Any, rows: Iterator[pd.DataFrame], timerValues: Any) -> Iterator[pd.DataFrame]:
        """Call the function for a key with rows."""
        if self._timeout != GroupStateTimeout.NoTimeout:
            for at in list(self._handle.listTimers()):
                self._handle.deleteTimer(at)
        return self._called(key, rows, timerValues, False)

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[pd.DataFrame]:
        """Call the function for a key that has timed out."""
        return self._called(key, iter(()), timerValues, True)

    def _called(
        self, key: Any, rows: Iterator[pd.DataFrame], times: Any, has_timed_out: bool
    ) -> Iterator[pd.DataFrame]:
        state = self._group_state(times, has_timed_out)
        yield from self._function(tuple(key), rows, state)
        self._keep(state)

    def _group_state(self, times: Any, has_timed_out: bool) -> GroupState:
        held = self._state.get()
        return GroupState(
            optionalValue=held,
            batchProcessingTimeMs=times.getCurrentProcessingTimeInMs(),
            eventTimeWatermarkMs=times.getCurrentWatermarkInMs(),
            timeoutConf=self._timeout,
            hasTimedOut=has_timed_out,
            watermarkPresent=self._timeout == GroupStateTimeout.EventTimeTimeout,
            defined=held is not None,
            updated=False,
            removed=False,
            timeoutTimestamp=GroupState.NO_TIMESTAMP,
            keyAsUnsafe=b"",
            valueSchema=self._schema,
        )

    def _keep(self, state: GroupState) -> None:
        if state._updated:
            self._state.update(state.get)
        elif state._removed:
            self._state.clear()
        if state._timeout_timestamp != GroupState.NO_TIMESTAMP:
            # A key has timed out when the time is above its timeout; a timer fires when the time has reached it.
            self._handle.registerTimer(state._timeout_timestamp + 1)
