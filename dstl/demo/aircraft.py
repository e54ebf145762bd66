"""The demo's processor of aircraft, and the same computation in plain Python.

A cancelled flight is counted and changes nothing else. An aircraft is *moved* when it leaves from another airport than
the last time, and *late* at each third departure in a row that is more than an hour late. Both depend on the order of
an aircraft's flights, which Spark does not promise inside a micro-batch: the processor sorts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pyarrow as pa
from pyspark.sql import Row
from pyspark.sql.streaming import StatefulProcessor, StatefulProcessorHandle

ALERT_SCHEMA = "tail string, number long, kind string, detail string"
STATE_NAME = "aircraft"
STATE_SCHEMA = "origin string, flights long, cancelled long, miles long, delay_minutes long, late_run int"

Alert = tuple[str | None, int, str, str]
"""A reported row; columns of :data:`ALERT_SCHEMA`."""
State = tuple[str | None, int, int, int, int, int]
"""Columns of :data:`STATE_SCHEMA`."""

_LATE_MINUTES, _LATE_IN_A_ROW = 60, 3
"""Rare enough that alerts are a small part of the rows, and enough in a row that one of them needs stored state."""


class AircraftProcessor(StatefulProcessor):  # type: ignore[misc]
    """Turns an aircraft's flights into alerts; Row style."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        """Declare the state."""
        self._state = handle.getValueState(STATE_NAME, STATE_SCHEMA)

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        """Take the aircraft's flights of one micro-batch, in any order."""
        held = self._state.get() if self._state.exists() else (None, 0, 0, 0, 0, 0)
        origin, flights, cancelled, miles, delay_minutes, late_run = held
        for row in sorted(rows, key=lambda each: each.number):
            flights += 1
            if row.delay is None:
                cancelled += 1
                continue
            if origin is not None and row.origin != origin:
                yield Row(tail=key[0], number=row.number, kind="moved", detail=f"{origin} to {row.origin}")
            origin = row.origin
            miles += row.distance
            delay_minutes += max(0, row.delay)
            late_run = late_run + 1 if row.delay > _LATE_MINUTES else 0
            if late_run and late_run % _LATE_IN_A_ROW == 0:
                yield Row(tail=key[0], number=row.number, kind="late", detail=f"{late_run} in a row")
        self._state.update((origin, flights, cancelled, miles, delay_minutes, late_run))

    def close(self) -> None:
        """Do nothing: nothing is held."""


def expected_result(flights: pa.Table) -> tuple[dict[str | None, State], Counter[Alert]]:
    """Return the final state of every aircraft and all alerts, computed without Spark and without DSTL.

    Aircraft by aircraft over the whole year: another order of work than the stream's, and none of its code.
    """
    by_tail: dict[str | None, list[tuple[int, str, int, int | None]]] = {}
    columns = (flights.column(name).to_pylist() for name in ("tail", "number", "origin", "distance", "delay"))
    for tail, number, origin, distance, delay in zip(*columns, strict=True):
        by_tail.setdefault(tail, []).append((number, origin, distance, delay))
    states: dict[str | None, State] = {}
    alerts: Counter[Alert] = Counter()
    for tail, rows in by_tail.items():
        flown = [row for row in rows if row[3] is not None]
        for before, after in pairwise(flown):
            if before[1] != after[1]:
                alerts[tail, after[0], "moved", f"{before[1]} to {after[1]}"] += 1
        run = 0
        for number, _, _, delay in flown:
            run = run + 1 if delay is not None and delay > _LATE_MINUTES else 0
            if run and run % _LATE_IN_A_ROW == 0:
                alerts[tail, number, "late", f"{run} in a row"] += 1
        states[tail] = (
            flown[-1][1] if flown else None,
            len(rows),
            len(rows) - len(flown),
            sum(distance for _, _, distance, _ in flown),
            sum(delay for *_, delay in flown if delay is not None and delay > 0),
            run,
        )
    return states, alerts
