"""``dstl segment``: read one segment offline."""

from __future__ import annotations

import asyncio
import json
from typing import Annotated, Any

import typer

from dstl.changelog.segment.inspection import describe_segment, dump_segment, fetch_segment, parse_key_groups
from dstl.cli import console
from dstl.errors import Invalid

app = console.group("Read one segment of the changelog offline.")

_OTHERS = {
    b"DSTLMAN1": "a manifest: check it with dstl checkpoints verify LOCATION. dstl checkpoints show LOCATION has "
    "--offset and --size of the segments inside it",
    b"DSTLSAV1": "a savepoint's record: see dstl savepoint verify LOCATION NAME",
    b"DSTLTIDX": "an index of a base's files: see dstl checkpoints verify LOCATION",
}
"""Objects of ours that are no segments, by how they begin, and what reads them."""

_Source = Annotated[
    str,
    typer.Argument(
        metavar="FILE-or-URL", help="A file, s3://bucket/prefix/name or file://; sealed: DSTL_SEALING_KEY_FILE"
    ),
]
_Offset = Annotated[int, typer.Option(help="Where it starts, for a segment inside a manifest.")]
_Size = Annotated[int | None, typer.Option(help="Its length, for a segment inside a manifest.")]


@console.command(app)
def show(
    source: _Source,
    offset: _Offset = 0,
    size: _Size = None,
    endpoint_url: console.EndpointUrl = None,
    wide: console.Wide = False,
) -> console.Answer:
    """Check every byte and print the index: logs, sequence numbers, blocks."""
    found = describe_segment(_fetch(source, offset, size, endpoint_url), source)
    return console.Answer(found, lambda: _show(found, wide))


def _show(found: dict[str, Any], wide: bool) -> None:
    typer.echo(f"segment format {found['format']}, {found['size']} bytes, CRC-32C {found['checksum']}: all intact")
    typer.echo(f"writer {console.printable(found['writer_id'])}")
    for name, value in found["metadata"].items():
        typer.echo(console.printable(f"{name} {value}"))
    for log in found["logs"]:
        table = console.new_table(
            f"log {log['log_id']}: [{log['from_sqn']}, {log['to_sqn']}), {log['changes']} changes",
            ((column.replace("_", " "), "right") for column in log["blocks"][0]),
        )
        for block in log["blocks"]:
            console.add_row(table, *block.values())
        console.print_table(table, wide=wide)


@app.command(epilog=console.EXIT_CODES)
def dump(
    source: _Source,
    log: Annotated[str | None, typer.Option(help="Only this log.")] = None,
    key_groups: Annotated[str | None, typer.Option(help="Only these: 7 or 0-15.")] = None,
    offset: _Offset = 0,
    size: _Size = None,
    endpoint_url: console.EndpointUrl = None,
    as_json: console.AsJson = False,
) -> None:
    """Print every change, one a line; keys and values as hexadecimal digits."""
    with console.errors_as_exit():
        wanted = parse_key_groups(key_groups) if key_groups else None
        data = _fetch(source, offset, size, endpoint_url)
        for row in dump_segment(data, source, log_id=log, key_groups=wanted):
            typer.echo(
                json.dumps(row) if as_json else console.printable(" ".join(f"{k}={_shown(v)}" for k, v in row.items()))
            )


def _shown(value: object) -> object:
    return "-" if value in (None, "") else value


def _fetch(source: str, offset: int, size: int | None, endpoint_url: str | None) -> bytes:
    data = asyncio.run(fetch_segment(source, offset, size, console.s3_options(endpoint_url), console.sealing_options()))
    other = _OTHERS.get(data[:8])
    if other is not None:
        raise Invalid(f"{source} is not a segment but {other}")
    return data
