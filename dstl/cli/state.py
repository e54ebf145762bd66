"""``dstl state``: the states of a checkpoint or savepoint, and the rows of one, without running its query."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import AsyncIterator, Callable
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from dstl.checkpoint.savepoint.creation import choose_checkpoint
from dstl.checkpoint.upkeep.listing import list_states
from dstl.cli import console
from dstl.errors import Invalid
from dstl.monitoring.text import age_text
from dstl.runtime import Runtime
from dstl.store.base import ObjectStore

if TYPE_CHECKING:
    from dstl.spark.saved_state.reader import StateColumns, StateRow

app = typer.Typer(
    help="The states of a checkpoint or savepoint, read offline; safe against a running job.",
    epilog=console.EXIT_CODES,
    no_args_is_help=True,
)

_TABLE_ROWS = 100
"""A table is laid out as a whole, so it is held in memory, and few look through more than some screens of it."""


class Format(StrEnum):
    """The format of the rows."""

    TABLE = "table"
    JSONL = "jsonl"
    PARQUET = "parquet"


_Checkpoint = Annotated[int | None, typer.Option(min=1, help="A retained checkpoint. Default: the latest.")]
_Savepoint = Annotated[str | None, typer.Option(help="Read this savepoint of LOCATION instead.")]


@app.command("list", epilog=console.EXIT_CODES)
def list_(
    location: console.Location,
    checkpoint: _Checkpoint = None,
    savepoint: _Savepoint = None,
    endpoint_url: console.EndpointUrl = None,
    wide: console.Wide = False,
    as_json: console.AsJson = False,
) -> None:
    """List the states that there are, by operator: what read takes as --operator and --state."""
    with console.errors_as_exit():
        _check_one(checkpoint, savepoint)
        found = console.run_at(
            location, endpoint_url, lambda store, runtime: list_states(store, runtime, checkpoint, savepoint)
        )
    if as_json:
        console.print_json(found)
        return
    names = ("operator", "state", "kind", "key", "user key", "value", "ttl")
    table = console.new_table(f"states of {location}", ((name, "left") for name in names))
    for row in found:
        to_live = age_text(row["ttl_ms"] / 1000) if row["ttl_ms"] else "none"
        console.add_row(table, *(row[name.replace(" ", "_")] for name in names[:-1]), to_live)
    console.print_table(table, wide=wide)


@app.command(epilog=console.EXIT_CODES)
def read(
    location: console.Location,
    operator: Annotated[str, typer.Option(help="The operator's name.")],
    state: Annotated[str, typer.Option(help="The state's name; $timers for the timers.")],
    checkpoint: _Checkpoint = None,
    savepoint: _Savepoint = None,
    output: Annotated[Format, typer.Option("--format", help="How rows are written.")] = Format.TABLE,
    out: Annotated[Path | None, typer.Option(help="Write to this file; Parquet needs one.")] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help=f"Most rows. Default: {_TABLE_ROWS} for a table, else all.")
    ] = None,
    endpoint_url: console.EndpointUrl = None,
    wide: console.Wide = False,
    as_json: console.AsJson = False,
) -> None:
    """Print the rows of one state: key, user key (map states and timers) and value.

    --json is --format jsonl; with --out it prints one JSON object that says what was written.
    """
    output = Format.JSONL if as_json and output is Format.TABLE else output
    with console.errors_as_exit():
        try:
            from dstl.spark.saved_state import export, reader
        except ImportError as error:
            raise Invalid(
                f"reading states needs PySpark's types ({error}): pip install 'dstl-pyspark[spark]'"
            ) from None
        if output is Format.PARQUET and out is None:
            raise Invalid("Parquet is written to a file: name it with --out")
        _check_one(checkpoint, savepoint)
        most = limit if limit is not None else _TABLE_ROWS if output is Format.TABLE else None
        # Rows that go to the terminal one by one have no bar among them, and a table is printed when it is gone.
        streamed = output is Format.JSONL and out is None
        with _open(out if output is Format.TABLE else None) as target:
            with console.progress_bar(f"reading {state}", shown=not streamed) as on_progress:

                def on_rows(count: int) -> None:
                    on_progress(count, count)

                async def work(store: ObjectStore, runtime: Runtime) -> tuple[int, Table | None]:
                    if savepoint is None:
                        found = await choose_checkpoint(store, runtime, checkpoint)
                    else:
                        found = await reader.find_savepoint(store, runtime, savepoint)
                    columns = reader.state_columns(found, operator, state)
                    async with contextlib.aclosing(
                        reader.read_state(store, runtime, found, operator, state)
                    ) as all_rows:
                        rows = _first(all_rows, most)
                        if output is Format.PARQUET and out is not None:
                            return await export.write_parquet(rows, columns, out, on_rows), None
                        if output is Format.JSONL:
                            with _open(out) as lines:
                                return await export.json_lines(rows, columns, lines, on_rows), None
                        return await _table(rows, columns, f"{operator}.{state}", on_rows)

                count, table = console.run_at(location, endpoint_url, work)
            if table is not None:
                console.print_table(table, wide=wide, file=target)
    if out is not None:
        if as_json:
            console.print_json({"out": str(out), "format": output.value, "rows": count})
        else:
            typer.echo(f"{count:,} rows written to {out}", err=True)
    elif output is Format.TABLE and count == most:
        typer.echo(f"the first {count:,} rows; --limit shows more", err=True)


async def _first(rows: AsyncIterator[StateRow], most: int | None) -> AsyncIterator[StateRow]:
    left = most
    async for row in rows:
        yield row
        if left is not None:
            left -= 1
            if left == 0:
                return


@contextlib.contextmanager
def _open(out: Path | None) -> Any:
    if out is None:
        yield sys.stdout
        return
    try:
        with out.open("w", encoding="utf-8") as target:
            yield target
    except OSError as error:
        raise Invalid(f"{out} cannot be written: {error.strerror}") from None


async def _table(
    rows: AsyncIterator[StateRow], columns: StateColumns, title: str, on_row: Callable[[int], None]
) -> tuple[int, Table]:
    from dstl.spark.saved_state.export import plain_rows

    parts = [("key", columns.key), ("user_key", columns.user_key), ("value", columns.value)]
    names = [(part, name) for part, schema in parts if schema is not None for name in schema.names]
    table = console.new_table(title, ((name if part == "value" else f"{part}.{name}", "left") for part, name in names))
    count = 0
    async for row in plain_rows(rows, columns):
        console.add_row(table, *("" if (value := row[part][name]) is None else value for part, name in names))
        count += 1
        on_row(count)
    return count, table


def _check_one(checkpoint: int | None, savepoint: str | None) -> None:
    if checkpoint is not None and savepoint is not None:
        raise Invalid("--checkpoint and --savepoint exclude each other")
