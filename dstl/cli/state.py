"""``dstl state read``: the rows of a state at a checkpoint or in a savepoint, without running its query."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import AsyncIterator, Callable
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from dstl.cli.console import EXIT_CODES, AsJson, EndpointUrl, Location, errors_as_exit, print_json, progress_bar, run_at
from dstl.errors import Invalid
from dstl.runtime import Runtime
from dstl.store.base import ObjectStore

if TYPE_CHECKING:
    from dstl.spark.state_reader import StateColumns, StateRow

__all__ = ["app"]

app = typer.Typer(
    help="The states of a checkpoint or savepoint, read offline; safe against a running job.",
    epilog=EXIT_CODES,
    no_args_is_help=True,
)

_TABLE_ROWS = 100


class Format(StrEnum):
    """How rows are written."""

    TABLE = "table"
    JSONL = "jsonl"
    PARQUET = "parquet"


@app.callback()
def _group() -> None:
    """Keep ``read`` a command of its own."""


@app.command(epilog=EXIT_CODES)
def read(
    location: Location,
    operator: Annotated[str, typer.Option(help="The operator's name.")],
    state: Annotated[str, typer.Option(help="The state's name; $timers for the timers.")],
    checkpoint: Annotated[int | None, typer.Option(min=1, help="A retained checkpoint. Default: the latest.")] = None,
    savepoint: Annotated[str | None, typer.Option(help="Read this savepoint of LOCATION instead.")] = None,
    output: Annotated[Format, typer.Option("--format", help="How rows are written.")] = Format.TABLE,
    out: Annotated[Path | None, typer.Option(help="Write to this file; Parquet needs one.")] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help=f"Most rows. Default: {_TABLE_ROWS} for a table, else all.")
    ] = None,
    endpoint_url: EndpointUrl = None,
    as_json: AsJson = False,
) -> None:
    """Print the rows of one state: key, user key (map states and timers) and value.

    --json is --format jsonl; with --out it prints one JSON object that says what was written.
    """
    output = Format.JSONL if as_json and output is Format.TABLE else output
    with errors_as_exit():
        if output is Format.PARQUET and out is None:
            raise Invalid("Parquet is written to a file: name it with --out")
        if checkpoint is not None and savepoint is not None:
            raise Invalid("--checkpoint and --savepoint exclude each other")
        most = limit if limit is not None else _TABLE_ROWS if output is Format.TABLE else None
        with progress_bar(f"reading {state}") as on_progress:

            async def work(store: ObjectStore, runtime: Runtime) -> int:
                return await _read(
                    store, runtime, operator, state, checkpoint, savepoint, output, out, most, on_progress
                )

            count = run_at(location, endpoint_url, work)
    if out is not None:
        if as_json:
            print_json({"out": str(out), "format": output.value, "rows": count})
        else:
            typer.echo(f"{count:,} rows written to {out}", err=True)
    elif output is Format.TABLE and count == most:
        typer.echo(f"the first {count:,} rows; --limit shows more", err=True)


async def _read(
    store: ObjectStore,
    runtime: Runtime,
    operator: str,
    state: str,
    checkpoint_id: int | None,
    savepoint: str | None,
    output: Format,
    out: Path | None,
    most: int | None,
    on_progress: Callable[[int, int], None],
) -> int:
    try:
        from dstl.spark.state_export import json_lines, write_parquet
        from dstl.spark.state_reader import find_checkpoint, find_savepoint, read_state, state_columns
    except ImportError as error:
        raise Invalid(f"reading states needs PySpark's types ({error}): pip install 'dstl-pyspark[spark]'") from None
    found = await (
        find_checkpoint(store, runtime, checkpoint_id)
        if savepoint is None
        else find_savepoint(store, runtime, savepoint)
    )
    columns = state_columns(found, operator, state)
    async with contextlib.aclosing(read_state(store, runtime, found, operator, state)) as all_rows:
        rows = _first(all_rows, most)
        if output is Format.PARQUET and out is not None:
            return await write_parquet(rows, columns, out, lambda done: on_progress(done, done))
        if output is Format.JSONL:
            with _opened(out) as target:
                return await json_lines(rows, columns, target, lambda done: on_progress(done, done))
        with _opened(out) as target:
            return await _table(rows, columns, f"{operator}.{state}", target)


async def _first(rows: AsyncIterator[StateRow], most: int | None) -> AsyncIterator[StateRow]:
    left = most
    async for row in rows:
        yield row
        if left is not None:
            left -= 1
            if left == 0:
                return


@contextlib.contextmanager
def _opened(out: Path | None) -> Any:
    if out is None:
        yield sys.stdout
        return
    try:
        with out.open("w", encoding="utf-8") as target:
            yield target
    except OSError as error:
        raise Invalid(f"{out} cannot be written: {error.strerror}") from None


async def _table(rows: AsyncIterator[StateRow], columns: StateColumns, title: str, target: Any) -> int:
    from dstl.spark.state_export import plain_rows

    table = Table(title=title)
    parts = [("key", columns.key), ("user_key", columns.user_key), ("value", columns.value)]
    names = [(part, name) for part, schema in parts if schema is not None for name in schema.names]
    for part, name in names:
        table.add_column(name if part == "value" else f"{part}.{name}")
    count = 0
    async for row in plain_rows(rows, columns):
        table.add_row(*("" if (value := row[part][name]) is None else str(value) for part, name in names))
        count += 1
    Console(file=target, soft_wrap=True).print(table)
    return count
