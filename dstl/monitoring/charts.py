"""Geometry of bar charts: what a template draws as SVG. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

WIDTH, HEIGHT = 1000.0, 100.0
"""Size of a chart's coordinates; it is drawn as wide as its place is."""
_GAP = 0.22
"""Share of a column's place that stays free: columns stand apart where there are few and where there are hundreds."""
WIDEST_COLUMN = 40.0
"""Fewer than 25 columns do not fill the chart: a bar that is wider than it is high reads as an area."""
_LEAST_BAR = 1.2
"""Height of the smallest value that is not 0: about a pixel, so that it is seen."""


@dataclass(frozen=True, slots=True)
class Bar:
    """A rectangle of one class."""

    kind: str
    x: float
    y: float
    width: float
    height: float


@dataclass(frozen=True, slots=True)
class Column:
    """The bars of one value, one above the other.

    Attributes:
        x: Left edge of its place.
        width: Of its place, the gap included.
        tip: Text that is shown for it.
        bars: From the bottom up.
    """

    x: float
    width: float
    tip: str
    bars: Sequence[Bar]


@dataclass(frozen=True, slots=True)
class Chart:
    """A chart.

    Attributes:
        columns: From left to right.
        ticks: Labels of the vertical axis: top, middle and bottom.
        is_empty: Whether there is nothing to be seen.
    """

    columns: Sequence[Column]
    ticks: Sequence[str]
    is_empty: bool


def ceiling(value: float) -> float:
    """Return a round number that is not below ``value``: 1, 2, 2.5 or 5 times a power of ten."""
    if value <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    return next(step * power for step in (1, 2, 2.5, 5, 10) if step * power >= value * 0.999999)


def bar_chart(
    rows: Sequence[tuple[Mapping[str, float], str]],
    label: Callable[[float], str],
    flags: Mapping[int, str] | None = None,
) -> Chart:
    """Return a chart of stacked bars.

    Args:
        rows: Of each column its values by class, from the bottom up, and its text.
        label: Writes a value of the vertical axis.
        flags: Columns that are marked from bottom to top, by place, with their class: of what has no value.
    """
    flags = flags or {}
    top = ceiling(max((sum(values.values()) for values, _ in rows), default=0.0))
    place = min(WIDTH / max(1, len(rows)), WIDEST_COLUMN)
    left = WIDTH - place * len(rows)
    columns = []
    for number, (values, tip) in enumerate(rows):
        x = left + number * place
        bars, y = [], HEIGHT
        if number in flags:
            bars.append(Bar(flags[number], x, 0.0, place * (1 - _GAP), HEIGHT))
        for kind, value in values.items():
            height = value / top * HEIGHT
            if value > 0:
                height = max(height, _LEAST_BAR if len(values) == 1 else 0.0)
                y -= height
                bars.append(Bar(kind, x, y, place * (1 - _GAP), height))
        columns.append(Column(x, place, tip, bars))
    return Chart(columns, (label(top), label(top / 2), label(0.0)), not any(column.bars for column in columns))
