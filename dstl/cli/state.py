"""``dstl state``: the states of a checkpoint or savepoint, and the rows of one, without running its query."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
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

app = console.group("The states of a checkpoint or savepoint, read offline; safe against a running job.")

_TABLE_ROWS = 100
"""A table is laid out as a whole, so it is held in memory, and few look through more than some screens of it."""


class Format(StrEnum):
    """The format of the rows."""

    TABLE = "table"
    JSONL = "jsonl"
    PARQUET = "parquet"


_Checkpoint = Annotated[int | None, typer.Option(min=1, help="A retained checkpoint. Default: the latest.")]
_Savepoint = Annotated[str | None, typer.Option(help="Read this savepoint of LOCATION instead.")]


@console.command(app, "list")
def list_(
    location: console.Location,
    checkpoint: _Checkpoint = None,
    savepoint: _Savepoint = None,
    endpoint_url: console.EndpointUrl = None,
    wide: console.Wide = False,
) -> console.Answer:
    """List the states that there are, by operator: what read takes as --operator and --state."""
    _check_one(checkpoint, savepoint)
    found = console.run_at(location, endpoint_url, list_states, checkpoint, savepoint)
    return console.Answer(found, lambda: _show_list(location, found, wide))


def _show_list(location: str, found: Sequence[dict[str, Any]], wide: bool) -> None:
    names = ("operator", "state", "kind", "key", "user key", "value", "ttl")
    table = console.new_table(f"states of {location}", ((name, "left") for name in names))
    for row in found:
        to_live = age_text(row["ttl_ms"] / 1000) if row["ttl_ms"] else "none"
        console.add_row(table, *(row[name.replace(" ", "_")] for name in names[:-1]), to_live)
    console.print_table(table, wide=wide)


_Operator = Annotated[str, typer.Option(help="The operator's name.")]
_State = Annotated[str, typer.Option(help="The state's name; $timers for the timers.")]
_Format = Annotated[Format, typer.Option("--format", help="How rows are written.")]
_Out = Annotated[Path | None, typer.Option(help="Write to this file; Parquet needs one.")]
_Limit = Annotated[int | None, typer.Option(min=1, help=f"Most rows. Default: {_TABLE_ROWS} for a table, else all.")]


@app.command(epilog=console.EXIT_CODES)
def read(
    location: console.Location,
    operator: _Operator,
    state: _State,
    checkpoint: _Checkpoint = None,
    savepoint: _Savepoint = None,
    output: _Format = Format.TABLE,
    out: _Out = None,
    limit: _Limit = None,
    endpoint_url: console.EndpointUrl = None,
    wide: console.Wide = False,
    as_json: console.AsJson = False,
) -> None:
    """Print the rows of one state: key, user key (map states and timers) and value.

    --json is --format jsonl; with --out it prints one JSON object that says what was written.
    """

    async def open_rows(store: ObjectStore, runtime: Runtime) -> _Rows:
        from dstl.spark.saved_state import reader

        if savepoint is None:
            found = await choose_checkpoint(store, runtime, checkpoint)
        else:
            found = await reader.find_savepoint(store, runtime, savepoint)
        columns = reader.state_columns(found, operator, state)
        return _Rows(columns, reader.read_state(store, runtime, found, operator, state))

    with console.errors_as_exit():
        _check_one(checkpoint, savepoint)
        work = partial(console.run_at, location, endpoint_url)
        _print(work, open_rows, f"{operator}.{state}", _Target(output, out, limit, wide, as_json))


@app.command(epilog=console.EXIT_CODES)
def changes(
    location: console.Location,
    operator: _Operator,
    state: _State,
    after: Annotated[
        int, typer.Option("--from", min=0, help="The checkpoint before the changes; 0 for the empty state.")
    ],
    to: Annotated[int | None, typer.Option(min=1, help="The checkpoint behind them. Default: the latest.")] = None,
    output: _Format = Format.TABLE,
    out: _Out = None,
    limit: _Limit = None,
    endpoint_url: console.EndpointUrl = None,
    wide: console.Wide = False,
    as_json: console.AsJson = False,
) -> None:
    """Print what has become of the rows of one state between two checkpoints: put, delete, or clear of a key.

    Read from the log where it goes back so far: every row that was written, once. Else both have to be retained, and
    are compared: every row that differs. With --out, --json prints one JSON object that says what was written.
    """

    async def open_rows(store: ObjectStore, runtime: Runtime) -> _Rows:
        from dstl.spark.saved_state.changes import find_span, read_changes

        span = await find_span(store, runtime, operator, after, to)
        columns = span.columns(state)
        return _Rows(columns, read_changes(store, runtime, span, state), span.source)

    with console.errors_as_exit():
        work = partial(console.run_at, location, endpoint_url)
        _print(work, open_rows, f"{operator}.{state}", _Target(output, out, limit, wide, as_json))


@dataclass(frozen=True, slots=True)
class _Rows:
    """Rows to be written: their types, and of changes where they come from."""

    columns: StateColumns
    rows: AsyncGenerator[StateRow]
    source: str = ""


@dataclass(frozen=True, slots=True)
class _Target:
    """The options that say how rows are written."""

    output: Format
    out: Path | None
    limit: int | None
    wide: bool
    as_json: bool


def _print(
    work: Callable[[Callable[[ObjectStore, Runtime], Any]], Any],
    open_rows: Callable[[ObjectStore, Runtime], Awaitable[_Rows]],
    title: str,
    target: _Target,
) -> None:
    output = Format.JSONL if target.as_json and target.output is Format.TABLE else target.output
    out = target.out
    try:
        from dstl.spark.saved_state import export
    except ImportError as error:
        raise Invalid(f"reading states needs PySpark's types ({error}): pip install 'dstl-pyspark[spark]'") from None
    if output is Format.PARQUET and out is None:
        raise Invalid("Parquet is written to a file: name it with --out")
    most = target.limit if target.limit is not None else _TABLE_ROWS if output is Format.TABLE else None
    # Rows that go to the terminal one by one have no bar among them, and a table is printed when it is gone.
    streamed = output is Format.JSONL and out is None
    with _open(out if output is Format.TABLE else None) as file:
        with console.progress_bar(f"reading {title.partition('.')[2]}", shown=not streamed) as on_progress:

            def on_rows(count: int) -> None:
                on_progress(count, count)

            async def write(store: ObjectStore, runtime: Runtime) -> tuple[int, Table | None, str]:
                found = await open_rows(store, runtime)
                async with contextlib.aclosing(found.rows) as all_rows:
                    rows = _first(all_rows, most)
                    if output is Format.PARQUET and out is not None:
                        return await export.write_parquet(rows, found.columns, out, on_rows), None, found.source
                    if output is Format.JSONL:
                        with _open(out) as lines:
                            return await export.json_lines(rows, found.columns, lines, on_rows), None, found.source
                    return *await _table(rows, found.columns, title, on_rows), found.source

            count, table, source = work(write)
        if table is not None:
            console.print_table(table, wide=target.wide, file=file)
    if out is not None and target.as_json:
        done = {"out": str(out), "format": output.value, "rows": count}
        console.print_json({**done, "source": source} if source else done)
        return
    if source:
        typer.echo(f"from {'the log' if source == 'log' else 'a comparison of both checkpoints'}", err=True)
    if out is not None:
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
    heads = [name if part == "value" else f"{part}.{name}" for part, name in names]
    table = console.new_table(title, ((name, "left") for name in (["change", *heads] if columns.has_change else heads)))
    count = 0
    async for row in plain_rows(rows, columns):
        told = (row["change"],) if columns.has_change else ()
        console.add_row(
            table, *told, *("" if (value := (row[part] or {}).get(name)) is None else value for part, name in names)
        )
        count += 1
        on_row(count)
    return count, table


def _check_one(checkpoint: int | None, savepoint: str | None) -> None:
    if checkpoint is not None and savepoint is not None:
        raise Invalid("--checkpoint and --savepoint exclude each other")
