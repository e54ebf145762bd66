"""The option ``--json`` of the benchmarks, and their figures' output."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from typing import Any


def add_json(parser: argparse.ArgumentParser) -> None:
    """Add ``--json``, which every benchmark has."""
    parser.add_argument("--json", action="store_true", help="one JSON object on the last line")


def print_figures(figures: Mapping[str, Any], *, as_json: bool) -> None:
    """Print one JSON object on one line, or one figure a line for people."""
    if as_json:
        print(json.dumps(figures))
        return
    for name, value in figures.items():
        shown = f"{value:.4f}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else value
        print(f"{name:30} {shown}")
