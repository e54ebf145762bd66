"""``dstl savepoint``: make, list, check, transform and delete savepoints."""

from __future__ import annotations

import dataclasses
import runpy
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from dstl.checkpoint.savepoint.creation import create_savepoint
from dstl.checkpoint.savepoint.deletion import WRITING_GRACE_S, SavepointListing, delete_savepoint, list_savepoints
from dstl.checkpoint.savepoint.format import Savepoint, savepoint_location
from dstl.checkpoint.upkeep.verification import verify_savepoint
from dstl.cli import console
from dstl.errors import Invalid
from dstl.monitoring.text import age_text, size_text, time_text
from dstl.runtime import Runtime, system_runtime
from dstl.store.base import ObjectStore
from dstl.store.location import absolute_location

app = console.group(
    "Savepoints: self-contained copies of a checkpoint that no cleanup touches. Restore one with "
    "StateBackend(location, restore_from='LOCATION/savepoints/NAME')."
)

_GRACE = f"{WRITING_GRACE_S / 3600:g}h"
"""The default of :func:`delete_savepoint`, as the option is written."""
_LISTED = ("name", "state", "detail", "objects", "bytes", "modified")
"""Fields of a listing that are told of every savepoint, a damaged one too."""
_Name = Annotated[str, typer.Argument(metavar="NAME", help="The savepoint's name.")]


@console.command(app)
def create(
    location: console.Location,
    name: _Name,
    checkpoint: Annotated[int | None, typer.Option(min=1, help="A retained checkpoint. Default: the latest.")] = None,
    to: Annotated[str | None, typer.Option(help="Where the savepoint goes. Default: the same location.")] = None,
    endpoint_url: console.EndpointUrl = None,
) -> console.Answer:
    """Copy a checkpoint of LOCATION to the savepoint NAME; its job may be running."""
    with console.progress_bar(f"savepoint {name}") as on_progress:

        async def work(source: ObjectStore, runtime: Runtime) -> Savepoint:
            target = source if to is None else console.open_at(to, endpoint_url)
            try:
                return await create_savepoint(
                    source, target, runtime, name, checkpoint_id=checkpoint, on_progress=on_progress
                )
            finally:
                if target is not source:
                    await target.close()

        made = console.run_at(location, endpoint_url, work)
    found = {"location": savepoint_location(absolute_location(to or location), name), **_describe(made)}
    return console.Answer(found, lambda: _show(f"savepoint {name}", found))


@console.command(app)
def transform(
    location: console.Location,
    name: _Name,
    new: Annotated[str, typer.Argument(metavar="NEW", help="The new savepoint's name.")],
    change: Annotated[
        list[str] | None,
        typer.Option(
            help="OPERATOR:STATE=FILE.py:FUNCTION, which returns the state's rows given those that it has, as "
            "DataFrames. Repeatable."
        ),
    ] = None,
    max_parallelism: Annotated[int | None, typer.Option(min=1, help="Key groups. Default: as many.")] = None,
    to: Annotated[str | None, typer.Option(help="Where the savepoint goes. Default: the same location.")] = None,
    conf: Annotated[
        list[str] | None, typer.Option(help="KEY=VALUE of the Spark session that makes it. Repeatable.")
    ] = None,
    endpoint_url: console.EndpointUrl = None,
) -> console.Answer:
    """Make the savepoint NEW of another one: with other rows in some states, or another max_parallelism.

    The functions run in this process, and their DataFrames in its Spark session.
    """
    try:
        from dstl.spark import transform_savepoint
    except ModuleNotFoundError as error:
        raise Invalid(f"this needs {error.name}: pip install 'dstl-pyspark[spark]'") from None

    states: dict[str, dict[str, Any]] = {}
    for state, function in console.pairs(change, "--change").items():
        operator, separator, held = state.rpartition(":")
        if not separator:
            raise Invalid(f"--change {state!r} does not begin with OPERATOR:STATE")
        states.setdefault(operator, {})[held] = _function(function)
    console.run_at(location, endpoint_url, list_savepoints)  # a wrong location is told as such, and before Spark starts
    report = transform_savepoint(
        savepoint_location(location, name),
        savepoint_location(to or location, new),
        states,
        max_parallelism=max_parallelism,
        spark=console.spark_session(console.pairs(conf, "--conf")),
        s3=console.s3_options(endpoint_url),
        sealing=console.sealing_options(),
    )
    found = dataclasses.asdict(report)
    return console.Answer(found, lambda: _show(f"savepoint {new}", found))


def _function(place: str) -> Any:
    file, separator, name = place.rpartition(":")
    if not separator:
        raise Invalid(f"{place!r} is not of the form FILE.py:FUNCTION")
    try:
        found = runpy.run_path(file).get(name)
    except OSError as error:
        raise Invalid(f"{file} cannot be read: {error}") from None
    except Exception as error:
        from dstl.state.processor_errors import raised_by  # needs PySpark, as its functions do

        raise raised_by(f"{file}, which is run for its functions,", error) from None
    if not callable(found):
        raise Invalid(f"{file} has no function {name!r}")
    return found


@console.command(app, "list")
def list_(
    location: console.Location,
    endpoint_url: console.EndpointUrl = None,
    wide: console.Wide = False,
) -> console.Answer:
    """List the savepoints of LOCATION, unfinished and damaged ones included."""
    found = console.run_at(location, endpoint_url, list_savepoints)
    return console.Answer([_describe_listing(each) for each in found], lambda: _show_list(location, found, wide))


def _show_list(location: str, found: Sequence[SavepointListing], wide: bool) -> None:
    now = system_runtime().clock.wall()
    names = ("name", "state", "checkpoint", "batch", "size", "entries", "age")
    table = console.new_table(
        f"savepoints of {location}", ((each, "left" if each in names[:2] else "right") for each in names)
    )
    for each in found:
        of = each.savepoint
        console.add_row(
            table,
            each.name,
            f"{each.state} {each.detail}".strip() if wide else each.state,
            of.checkpoint_id if of else "-",
            of.batch_id if of else "-",
            size_text(each.bytes),
            f"{of.entries:,}" if of else "-",
            age_text(now - (of.created_at if of else each.modified)),
        )
    console.print_table(table, wide=wide)
    for each in found:
        if each.detail and not wide:
            typer.echo(console.printable(f"{each.name} is {each.state}: {each.detail}"))


@console.command(app)
def verify(location: console.Location, name: _Name, endpoint_url: console.EndpointUrl = None) -> console.Answer:
    """Read and decode every byte of a savepoint and report every object that is damaged or missing."""
    with console.progress_bar(f"verifying {name}") as on_progress:
        done = console.run_at(location, endpoint_url, verify_savepoint, name, on_progress=on_progress)
    found = {"ok": not done.problems, **_describe(done.savepoint), "problems": list(done.problems)}
    title = f"savepoint {name}: {'sound' if not done.problems else 'DAMAGED'}"
    return console.Answer(found, lambda: _show(title, found), not done.problems)


@console.command(app)
def delete(
    location: console.Location,
    name: _Name,
    commit: Annotated[bool, typer.Option("--commit", help="Delete. Without it, only say what would go.")] = False,
    grace: Annotated[
        str,
        typer.Option(help="How long files without a descriptor count as being written: 90s, 15m, 1h or 7d."),
    ] = _GRACE,
    endpoint_url: console.EndpointUrl = None,
) -> console.Answer:
    """Delete a savepoint, or what is left of an unfinished one; a dry run unless --commit is given."""
    grace_s = console.parse_duration(grace)
    done = console.run_at(location, endpoint_url, delete_savepoint, name, commit=commit, grace_s=grace_s)
    found = {
        "name": name,
        "state": done.state,
        "deleted": done.committed,
        "objects": list(done.objects),
        "bytes": done.bytes,
    }
    verb = "deleted" if done.committed else "would be deleted: run again with --commit"
    last = f"{len(done.objects)} objects, {size_text(done.bytes)}, {verb}"
    return console.Answer(found, lambda: typer.echo("\n".join((*map(console.printable, done.objects), last))))


def _describe(savepoint: Savepoint) -> dict[str, Any]:
    return {
        "name": savepoint.name,
        "checkpoint": savepoint.checkpoint_id,
        "batch": savepoint.batch_id,
        "query_id": savepoint.query_id,
        "source": savepoint.source,
        "created_at": savepoint.created_at,
        "watermark_ms": savepoint.watermark_ms,
        "max_parallelism": savepoint.max_parallelism,
        "operators": [entry.uid for entry in savepoint.operators],
        "objects": len(savepoint.files) + 1,
        "bytes": savepoint.bytes,
        "entries": savepoint.entries,
    }


def _describe_listing(listing: SavepointListing) -> dict[str, Any]:
    described = _describe(listing.savepoint) if listing.savepoint else {}
    return described | {name: getattr(listing, name) for name in _LISTED}


def _show(title: str, found: dict[str, Any]) -> None:
    table = console.new_table(title)
    for name, value in found.items():
        shown: object = value
        if name == "bytes":
            shown = f"{size_text(value)} ({value:,} bytes)"
        elif name == "created_at":
            shown = time_text(value)
        elif isinstance(value, list):
            shown = tuple(value) or "none"
        elif isinstance(value, int) and not isinstance(value, bool):
            shown = f"{value:,}"
        console.add_row(table, name.replace("_", " "), shown)
    console.print_table(table)
