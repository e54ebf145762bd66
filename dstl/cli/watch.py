"""``dstl checkpoints watch``: a running query's checkpoints, one line each as they are made."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Annotated, Any

import typer

from dstl.checkpoint.upkeep.listing import list_checkpoints
from dstl.cli import console
from dstl.errors import AccessDenied, Invalid, Unavailable
from dstl.monitoring.text import size_text, time_text
from dstl.runtime import Runtime
from dstl.store.base import ObjectStore

_COLUMNS: dict[str, Callable[[dict[str, Any]], str]] = {
    "checkpoint": lambda row: str(row["checkpoint_id"]),
    "batch": lambda row: str(row["batch_id"]),
    "made": lambda row: time_text(row["created_at"])[11:],
    "after": lambda row: "-" if row["seconds_since_previous"] is None else f"{row['seconds_since_previous']:.1f} s",
    "new": lambda row: size_text(row["new_bytes"]),
    "full": lambda row: size_text(row["full_bytes"]),
    "to restore": lambda row: size_text(row["restore_bytes"]),
}
_WIDTH = max(map(len, _COLUMNS))
"""No value is wider than the widest heading."""


def watch(
    location: console.Location,
    every: Annotated[str, typer.Option(help="How often the store is asked: 2s, 1m. Each time costs a list.")] = "5s",
    count: Annotated[
        int | None, typer.Option(min=1, help="End after this many checkpoints. Default: at Ctrl+C.")
    ] = None,
    endpoint_url: console.EndpointUrl = None,
    as_json: console.AsJson = False,
) -> None:
    """Print a line for each checkpoint of LOCATION as it is made, those that are retained first.

    It only reads. A location that no query has used yet is waited for; a store that does not answer is asked again.
    With --json each line is a JSON object.
    """
    with console.errors_as_exit():
        every_s = console.parse_duration(every)
        if every_s < 1:
            raise Invalid(f"--every {every} is below a second: each look costs requests")
        if not as_json:
            typer.echo(" ".join(f"{name:>{_WIDTH}}" for name in _COLUMNS))
        try:
            console.run_at(
                location, endpoint_url, lambda store, runtime: _watch(store, runtime, every_s, count, as_json)
            )
        except KeyboardInterrupt:
            raise typer.Exit(0) from None


async def _watch(store: ObjectStore, runtime: Runtime, every_s: float, count: int | None, as_json: bool) -> None:
    seen = shown = 0
    while True:
        for row in await _newer(store, runtime, seen):
            seen = row["checkpoint_id"]
            _print(row, as_json)
            shown += 1
            if shown == count:
                return
        await asyncio.sleep(every_s)


async def _newer(store: ObjectStore, runtime: Runtime, seen: int) -> list[dict[str, Any]]:
    """Return what the location has that was not shown yet, oldest first."""
    try:
        found = await list_checkpoints(store, runtime)
    except Unavailable as error:
        typer.echo(f"{type(error).__name__}: {console.printable(error)}; asking again", err=True)
        return []
    except AccessDenied:
        raise
    except Invalid:
        return []  # no query has used it yet
    return [row for row in found["checkpoints"] if row["checkpoint_id"] > seen]


def _print(row: dict[str, Any], as_json: bool) -> None:
    if as_json:
        console.print_json(row)
    elif row["state"] == "damaged":
        typer.echo(console.printable(f"{row['checkpoint_id']:>{_WIDTH}} DAMAGED {row['detail']}"))
    else:
        typer.echo(" ".join(f"{of(row):>{_WIDTH}}" for of in _COLUMNS.values()))
