"""The option ``--json`` of the benchmarks, and their figures' output."""

import argparse
import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

_UNITS = {"s": "s", "ms": "ms", "us": "us", "mb": "MB", "share": "%", "pct": "%"}
_TIMES = {"s": "/s", "hour": "/h"}
_RATIO = "ratio"


def add_json(parser: argparse.ArgumentParser) -> None:
    """Add ``--json``, which every benchmark has."""
    parser.add_argument("--json", action="store_true", help="one JSON object on the last line")


def print_figures(figures: Mapping[str, Any], *, as_json: bool) -> None:
    """Print one JSON object on one line, or a table of names, figures and units for people."""
    if as_json:
        print(json.dumps(figures))
        return
    print_table("", ("figure", "value", "unit"), _rows(figures))


def print_table(title: str, columns: Iterable[str], rows: Iterable[Iterable[str]]) -> None:
    """Print a table whose first column is of names and whose others are of figures."""
    table = Table(title=title or None, title_justify="left")
    for at, column in enumerate(columns):
        table.add_column(column, justify="right" if at and column != "unit" else "left", overflow="fold")
    for row in rows:
        table.add_row(*row)
    # Names and figures of ours, and no markup.
    Console(markup=False, highlight=False, soft_wrap=False).print(table)


def number(value: Any) -> str:
    """Return a figure with as many digits as mean something: four."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    if isinstance(value, int) or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def _rows(figures: Mapping[str, Any], within: str = "") -> Iterator[tuple[str, str, str]]:
    for name, value in figures.items():
        if isinstance(value, Mapping):
            yield from _rows(value, f"{within}{name}.")
        elif isinstance(value, list):
            for at, each in enumerate(value):
                if isinstance(each, Mapping):
                    yield from _rows(each, f"{within}{name}[{at}].")
                else:
                    yield f"{within}{name}[{at}]", number(each), ""
        else:
            yield f"{within}{name}", number(value), _unit(f"{within}{name}")


def _unit(name: str) -> str:
    """Return the unit that a figure's name says, as ``restore_s``, ``checkpoint_ms.p50`` and ``events_per_s`` do."""
    for part in reversed(name.split(".")):
        of, _, per = part.partition("_per_")
        words = of.split("_")
        if _RATIO in words:
            return "x"
        found = next((_UNITS[word] for word in reversed(words) if word in _UNITS), "") + _TIMES.get(per, "")
        if found:
            return found
    return ""
