"""``dstl segment``: read one segment offline."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from dstl.changelog.segment_inspection import describe_segment, dump_segment, fetch_segment, parse_key_groups
from dstl.cli.console import AsJson, print_json
from dstl.errors import DstlError

__all__ = ["app"]

app = typer.Typer(help="Read one segment of the changelog offline.", no_args_is_help=True)

_Source = Annotated[str, typer.Argument(metavar="FILE-or-URL", help="A file, s3://bucket/prefix/name or file://")]
_Offset = Annotated[int, typer.Option(help="Where it starts, for a segment inside a manifest.")]
_Size = Annotated[int | None, typer.Option(help="Its length, for a segment inside a manifest.")]


@app.command()
def show(source: _Source, offset: _Offset = 0, size: _Size = None, as_json: AsJson = False) -> None:
    """Check every byte and print the index: logs, sequence numbers, blocks."""
    with _errors_as_exit():
        found: dict[str, Any] = describe_segment(asyncio.run(fetch_segment(source, offset, size)), source)
    if as_json:
        print_json(found)
        return
    typer.echo(f"segment format {found['format']}, {found['size']} bytes, CRC-32C {found['checksum']}: all intact")
    typer.echo(f"writer {found['writer_id']}")
    for name, value in found["metadata"].items():
        typer.echo(f"{name} {value}")
    console = Console(soft_wrap=True)
    for log in found["logs"]:
        table = Table(title=f"log {log['log_id']}: [{log['from_sqn']}, {log['to_sqn']}), {log['changes']} changes")
        for column in log["blocks"][0]:
            table.add_column(column.replace("_", " "), justify="right")
        for block in log["blocks"]:
            table.add_row(*map(str, block.values()))
        console.print(table)


@app.command()
def dump(
    source: _Source,
    log: Annotated[str | None, typer.Option(help="Only this log.")] = None,
    key_groups: Annotated[str | None, typer.Option(help="Only these: 7 or 0-15.")] = None,
    offset: _Offset = 0,
    size: _Size = None,
    as_json: AsJson = False,
) -> None:
    """Print every change, one a line; keys and values as hexadecimal digits."""
    with _errors_as_exit():
        wanted = parse_key_groups(key_groups) if key_groups else None
        data = asyncio.run(fetch_segment(source, offset, size))
        for row in dump_segment(data, source, log_id=log, key_groups=wanted):
            typer.echo(json.dumps(row) if as_json else " ".join(f"{k}={_shown(v)}" for k, v in row.items()))


def _shown(value: object) -> object:
    return "-" if value in (None, "") else value


@contextmanager
def _errors_as_exit() -> Iterator[None]:
    try:
        yield
    except DstlError as error:
        typer.echo(f"{type(error).__name__}: {error}", err=True)
        raise typer.Exit(1) from None
