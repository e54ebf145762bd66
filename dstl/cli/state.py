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

from dstl.checkpoint.upkeep.listing import list_states
from dstl.cli.console import (
    EXIT_CODES,
    AsJson,
    EndpointUrl,
    Location,
    Wide,
    add_row,
    age_text,
    errors_as_exit,
    new_table,
    print_json,
    print_table,
    progress_bar,
    run_at,
)
from dstl.errors import Invalid
from dstl.runtime import Runtime
from dstl.store.base import ObjectStore

if TYPE_CHECKING:
    from dstl.spark.saved_state.reader import StateColumns, StateRow

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


_Checkpoint = Annotated[int | None, typer.Option(min=1, help="A retained checkpoint. Default: the latest.")]
_Savepoint = Annotated[str | None, typer.Option(help="Read this savepoint of LOCATION instead.")]


@app.command("list", epilog=EXIT_CODES)
def list_(
    location: Location,
    checkpoint: _Checkpoint = None,
    savepoint: _Savepoint = None,
    endpoint_url: EndpointUrl = None,
    wide: Wide = False,
    as_json: AsJson = False,
) -> None:
    """List the states that there are, by operator: what read takes as --operator and --state."""
    with errors_as_exit():
        _check_one(checkpoint, savepoint)
        found = run_at(
            location, endpoint_url, lambda store, runtime: list_states(store, runtime, checkpoint, savepoint)
        )
    if as_json:
        print_json(found)
        return
    names = ("operator", "state", "kind", "key", "user key", "value", "lives")
    table = new_table(f"states of {location}", ((name, "left") for name in names))
    for row in found:
        lives = age_text(row["ttl_ms"] / 1000) if row["ttl_ms"] else "for ever"
        add_row(table, *(row[name.replace(" ", "_")] for name in names[:-1]), lives)
    print_table(table, wide=wide)


@app.command(epilog=EXIT_CODES)
def read(
    location: Location,
    operator: Annotated[str, typer.Option(help="The operator's name.")],
    state: Annotated[str, typer.Option(help="The state's name; $timers for the timers.")],
    checkpoint: _Checkpoint = None,
    savepoint: _Savepoint = None,
    output: Annotated[Format, typer.Option("--format", help="How rows are written.")] = Format.TABLE,
    out: Annotated[Path | None, typer.Option(help="Write to this file; Parquet needs one.")] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help=f"Most rows. Default: {_TABLE_ROWS} for a table, else all.")
    ] = None,
    endpoint_url: EndpointUrl = None,
    wide: Wide = False,
    as_json: AsJson = False,
) -> None:
    """Print the rows of one state: key, user key (map states and timers) and value.

    --json is --format jsonl; with --out it prints one JSON object that says what was written.
    """
    output = Format.JSONL if as_json and output is Format.TABLE else output
    with errors_as_exit():
        if output is Format.PARQUET and out is None:
            raise Invalid("Parquet is written to a file: name it with --out")
        _check_one(checkpoint, savepoint)
        most = limit if limit is not None else _TABLE_ROWS if output is Format.TABLE else None
        # Rows that go to the terminal one by one have no bar among them, and a table is printed when it is gone.
        streamed = output is Format.JSONL and out is None
        with _opened(out if output is Format.TABLE else None) as target:
            with progress_bar(f"reading {state}", shown=not streamed) as on_progress:

                async def work(store: ObjectStore, runtime: Runtime) -> tuple[int, Table | None]:
                    return await _read(
                        store, runtime, operator, state, checkpoint, savepoint, output, out, most, on_progress
                    )

                count, table = run_at(location, endpoint_url, work)
            if table is not None:
                print_table(table, wide=wide, file=target)
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
) -> tuple[int, Table | None]:
    try:
        from dstl.spark.saved_state.export import json_lines, write_parquet
        from dstl.spark.saved_state.reader import find_checkpoint, find_savepoint, read_state, state_columns
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
            return await write_parquet(rows, columns, out, lambda done: on_progress(done, done)), None
        if output is Format.JSONL:
            with _opened(out) as target:
                return await json_lines(rows, columns, target, lambda done: on_progress(done, done)), None
        return await _table(rows, columns, f"{operator}.{state}", lambda done: on_progress(done, done))


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


async def _table(
    rows: AsyncIterator[StateRow], columns: StateColumns, title: str, on_row: Callable[[int], None]
) -> tuple[int, Table]:
    from dstl.spark.saved_state.export import plain_rows

    parts = [("key", columns.key), ("user_key", columns.user_key), ("value", columns.value)]
    names = [(part, name) for part, schema in parts if schema is not None for name in schema.names]
    table = new_table(title, ((name if part == "value" else f"{part}.{name}", "left") for part, name in names))
    count = 0
    async for row in plain_rows(rows, columns):
        add_row(table, *("" if (value := row[part][name]) is None else value for part, name in names))
        count += 1
        on_row(count)
    return count, table


def _check_one(checkpoint: int | None, savepoint: str | None) -> None:
    if checkpoint is not None and savepoint is not None:
        raise Invalid("--checkpoint and --savepoint exclude each other")
