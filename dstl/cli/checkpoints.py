"""``dstl checkpoints``: list, show, verify and watch the checkpoints of a location."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import asdict
from typing import Annotated, Any

import typer

from dstl.checkpoint.upkeep.listing import describe_checkpoint, list_checkpoints
from dstl.checkpoint.upkeep.verification import LocationVerification, verify_location
from dstl.cli import console
from dstl.errors import AccessDenied, Invalid, Unavailable
from dstl.monitoring.text import age_text, size_text, time_text
from dstl.runtime import Runtime, system_runtime
from dstl.store.base import ObjectStore

app = console.group("Checkpoints of a location. These commands only read, and are safe beside a running query.")


@console.command(app, "list")
def list_(
    location: console.Location, endpoint_url: console.EndpointUrl = None, wide: console.Wide = False
) -> console.Answer:
    """List the retained checkpoints of LOCATION, oldest first; damaged records are listed too (exit code 1).

    Older ones are deleted several at a time, so there may be up to ten more than checkpoints.retained.
    """
    found = console.run_at(location, endpoint_url, list_checkpoints)
    is_sound = all(row["state"] != "damaged" for row in found["checkpoints"])
    return console.Answer(found, lambda: _show_list(found, wide), is_sound)


@console.command(app)
def show(
    location: console.Location,
    checkpoint: Annotated[
        int | None, typer.Argument(min=1, metavar="[CHECKPOINT]", help="Its number. Default: the latest.")
    ] = None,
    endpoint_url: console.EndpointUrl = None,
    wide: console.Wide = False,
) -> console.Answer:
    """Show what one checkpoint is made of: operators, base files, logs, segments."""
    found = console.run_at(location, endpoint_url, describe_checkpoint, checkpoint)
    return console.Answer(found, lambda: _show_one(found, wide))


@console.command(app)
def verify(location: console.Location, endpoint_url: console.EndpointUrl = None) -> console.Answer:
    """Read every byte of every checkpoint of LOCATION and report each object that is damaged or missing.

    Checked: existence, size, CRC-32C of objects and blocks, contents of blocks, change sets and key groups.
    """
    started = system_runtime().clock.now()
    with console.progress_bar("verifying") as on_progress:
        done = console.run_at(location, endpoint_url, verify_location, on_progress=on_progress)
    told = location, done, system_runtime().clock.now() - started
    return console.Answer(_describe(*told), lambda: _show_verification(*told), not done.problems)


_COLUMNS: dict[str, Callable[[dict[str, Any]], object]] = {
    "checkpoint": lambda row: row["checkpoint_id"],
    "batch": lambda row: row["batch_id"],
    "age": lambda row: age_text(row["age_s"]),
    "after": lambda row: "-" if row["seconds_since_previous"] is None else age_text(row["seconds_since_previous"]),
    "new": lambda row: size_text(row["new_bytes"]),
    "full": lambda row: size_text(row["full_bytes"]),
    "to restore": lambda row: size_text(row["restore_bytes"]),
    "segments": lambda row: f"{row['segments_stored']} + {row['segments_inlined']} inlined",
    "bases": lambda row: row["base_files"],
    "state": lambda row: row["state"],
}
_NARROW = ("checkpoint", "batch", "age", "full", "to restore", "state")
_AS_MADE: dict[str, Callable[[dict[str, Any]], object]] = _COLUMNS | {
    "made": lambda row: time_text(row["created_at"])[11:],
    "after": lambda row: "-" if row["seconds_since_previous"] is None else f"{row['seconds_since_previous']:.1f} s",
}
_WATCHED = ("checkpoint", "batch", "made", "after", "new", "full", "to restore")
_WIDTH = max(map(len, _WATCHED))
"""No value is wider than the widest heading."""


@app.command(epilog=console.EXIT_CODES)
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
            typer.echo(" ".join(f"{name:>{_WIDTH}}" for name in _WATCHED))
        try:
            console.run_at(location, endpoint_url, _watch, every_s, count, as_json)
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
        typer.echo(" ".join(f"{_AS_MADE[name](row):>{_WIDTH}}" for name in _WATCHED))


def _describe(location: str, done: LocationVerification, seconds: float) -> dict[str, Any]:
    return {
        "ok": not done.problems,
        "location": location,
        "query_id": done.query_id,
        "checkpoints": [c.checkpoint_id for c in done.checkpoints],
        "objects": done.objects,
        "bytes": done.bytes,
        "seconds": round(seconds, 3),
        "strays": done.strays,
        "other_objects": done.others,
        "problems": [asdict(problem) for problem in done.problems],
    }


def _show_verification(location: str, done: LocationVerification, seconds: float) -> None:
    numbers = ", ".join(f"{c.checkpoint_id} (batch {c.batch_id})" for c in done.checkpoints) or "none"
    typer.echo(f"{console.printable(location)} of query {console.printable(done.query_id)}: checkpoints {numbers}")
    typer.echo(f"{done.objects} objects, {size_text(done.bytes)} read in {seconds:.1f} s")
    if done.strays or done.others:
        typer.echo(f"{done.strays} objects that no checkpoint needs (dstl gc), {done.others} that are not DSTL's")
    for problem in done.problems:
        whose = f" (checkpoints {', '.join(map(str, problem.checkpoints))})" if problem.checkpoints else ""
        typer.echo(console.printable(f"{problem.kind.upper()} {problem.object}{whose}: {problem.detail}"))
        typer.echo(f"  next: {console.printable(problem.next_step)}")
    typer.echo("all sound" if not done.problems else f"{len(done.problems)} PROBLEMS")


def _show_list(found: dict[str, Any], wide: bool) -> None:
    now = system_runtime().clock.wall()
    columns = list(_COLUMNS if wide else _NARROW)
    table = console.new_table(
        f"checkpoints of {found['location']}, query {found['query_id'] or '-'}",
        ((column, "left" if column == "state" else "right") for column in columns),
    )
    damaged = []
    for row in found["checkpoints"]:
        if row["state"] == "damaged":
            damaged.append(row)
            console.add_row(table, row["checkpoint_id"], *"-" * (len(columns) - 2), "DAMAGED")
        else:
            console.add_row(table, *(_COLUMNS[column](row | {"age_s": now - row["created_at"]}) for column in columns))
    console.print_table(table, wide=wide)
    for row in damaged:
        typer.echo(f"DAMAGED {row['checkpoint_id']}: {console.printable(row['detail'])}")


def _show_one(found: dict[str, Any], wide: bool) -> None:
    facts = console.new_table(f"checkpoint {found['checkpoint_id']} of {found['location']}")
    console.add_row(facts, "batch", found["batch_id"])
    console.add_row(facts, "parent", found["parent"] or "none")
    console.add_row(facts, "run", found["run_id"])
    console.add_row(facts, "made", time_text(found["created_at"]))
    console.add_row(facts, "key groups", found["max_parallelism"])
    for name in ("new_bytes", "full_bytes", "restore_bytes", "manifest_bytes"):
        console.add_row(facts, name.removesuffix("_bytes"), size_text(found[name]))
    console.print_table(facts, wide=wide)
    for what in ("operators", "bases", "logs", "segments"):
        rows = found[what]
        if not rows:
            continue
        left = f", the last {console.SHOWN_ROWS} (all with --json)" if len(rows) > console.SHOWN_ROWS else ""
        table = console.new_table(
            f"{len(rows)} {what if len(rows) > 1 else what.removesuffix('s')}{left}",
            (
                (column.removesuffix("_ms").replace("_", " "), "right" if isinstance(value, int) else "left")
                for column, value in rows[0].items()
            ),
        )
        for row in rows[-console.SHOWN_ROWS :]:
            console.add_row(table, *(_shown(column, row[column]) for column in rows[0]))
        console.print_table(table, wide=wide)


def _shown(column: str, value: Any) -> object:
    if column == "size":
        return size_text(value)
    if column == "watermark_ms" and value is not None:
        return time_text(value / 1000)
    if column == "states":
        return tuple(each["name"] for each in value.get("states", ())) or "none"
    return "-" if value is None else value
