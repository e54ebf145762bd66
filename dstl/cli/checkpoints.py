"""``dstl checkpoints``: what a location holds, and whether every byte of it can be read."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from dstl.checkpoint.checkpoint_listing import describe_checkpoint, list_checkpoints
from dstl.checkpoint.verification import LocationVerification, verify_location
from dstl.cli.console import (
    EXIT_CODES,
    AsJson,
    EndpointUrl,
    Location,
    age_text,
    errors_as_exit,
    print_json,
    progress_bar,
    run_at,
    size_text,
    time_text,
)
from dstl.runtime import system_runtime

__all__ = ["app"]

app = typer.Typer(
    help="Checkpoints of a location. These commands only read, and are safe beside a running query.",
    epilog=EXIT_CODES,
    no_args_is_help=True,
)

_SHOWN_ROWS = 20


@app.command("list", epilog=EXIT_CODES)
def list_(location: Location, endpoint_url: EndpointUrl = None, as_json: AsJson = False) -> None:
    """List the retained checkpoints of LOCATION, oldest first; damaged records are listed too (exit code 1)."""
    with errors_as_exit():
        found = run_at(location, endpoint_url, list_checkpoints)
    if as_json:
        print_json(found)
    else:
        _show_list(found)
    if any(row["state"] == "damaged" for row in found["checkpoints"]):
        raise typer.Exit(1)


@app.command(epilog=EXIT_CODES)
def show(
    location: Location,
    checkpoint: Annotated[
        int | None, typer.Argument(min=1, metavar="[CHECKPOINT]", help="Its number. Default: the latest.")
    ] = None,
    endpoint_url: EndpointUrl = None,
    as_json: AsJson = False,
) -> None:
    """Show what one checkpoint is made of: operators, base files, logs, segments."""
    with errors_as_exit():
        found = run_at(location, endpoint_url, lambda store, runtime: describe_checkpoint(store, runtime, checkpoint))
    if as_json:
        print_json(found)
    else:
        _show_one(found)


@app.command(epilog=EXIT_CODES)
def verify(location: Location, endpoint_url: EndpointUrl = None, as_json: AsJson = False) -> None:
    """Read every byte of every checkpoint of LOCATION and report each object that is damaged or missing.

    Checked: existence, size, CRC-32C of objects and blocks, contents of blocks, change sets and key groups.
    """
    started = system_runtime().clock.now()
    with errors_as_exit(), progress_bar("verifying") as on_progress:
        done = run_at(
            location,
            endpoint_url,
            lambda store, runtime: verify_location(store, runtime, on_progress=on_progress),
        )
    seconds = system_runtime().clock.now() - started
    if as_json:
        print_json(_verified(location, done, seconds))
    else:
        _show_verified(location, done, seconds)
    if done.problems:
        raise typer.Exit(1)


def _verified(location: str, done: LocationVerification, seconds: float) -> dict[str, Any]:
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
        "problems": [
            {
                "object": p.object,
                "checkpoints": list(p.checkpoints),
                "kind": p.kind,
                "detail": p.detail,
                "next_step": p.next_step,
            }
            for p in done.problems
        ],
    }


def _show_verified(location: str, done: LocationVerification, seconds: float) -> None:
    numbers = ", ".join(f"{c.checkpoint_id} (batch {c.batch_id})" for c in done.checkpoints) or "none"
    typer.echo(f"{location} of query {done.query_id}: checkpoints {numbers}")
    typer.echo(f"{done.objects} objects, {size_text(done.bytes)} read in {seconds:.1f} s")
    if done.strays or done.others:
        typer.echo(f"{done.strays} objects that no checkpoint needs (dstl gc), {done.others} that are not DSTL's")
    for problem in done.problems:
        whose = f" (checkpoints {', '.join(map(str, problem.checkpoints))})" if problem.checkpoints else ""
        typer.echo(f"{problem.kind.upper()} {problem.object}{whose}: {problem.detail}\n  next: {problem.next_step}")
    typer.echo("all sound" if not done.problems else f"{len(done.problems)} PROBLEMS")


def _show_list(found: dict[str, Any]) -> None:
    now = system_runtime().clock.wall()
    table = Table(title=f"checkpoints of {found['location']}, query {found['query_id'] or '-'}")
    for column in ("checkpoint", "batch", "age", "after", "new", "full", "to restore", "segments", "bases", "state"):
        table.add_column(column, justify="left" if column == "state" else "right")
    for row in found["checkpoints"]:
        if row["state"] == "damaged":
            table.add_row(str(row["checkpoint_id"]), *"-" * 8, f"DAMAGED {row['detail']}")
            continue
        since = row["seconds_since_previous"]
        table.add_row(
            str(row["checkpoint_id"]),
            str(row["batch_id"]),
            age_text(now - row["created_at"]),
            "-" if since is None else age_text(since),
            size_text(row["new_bytes"]),
            size_text(row["full_bytes"]),
            size_text(row["restore_bytes"]),
            f"{row['segments_stored']} + {row['segments_inlined']} inlined",
            str(row["base_files"]),
            row["state"],
        )
    Console(soft_wrap=True).print(table)


def _show_one(found: dict[str, Any]) -> None:
    console = Console(soft_wrap=True)
    facts = Table(title=f"checkpoint {found['checkpoint_id']} of {found['location']}", show_header=False)
    facts.add_row("batch", str(found["batch_id"]))
    facts.add_row("parent", str(found["parent"] or "none"))
    facts.add_row("run", found["run_id"])
    facts.add_row("made", time_text(found["created_at"]))
    facts.add_row("key groups", str(found["max_parallelism"]))
    for name in ("new_bytes", "full_bytes", "restore_bytes", "manifest_bytes"):
        facts.add_row(name.removesuffix("_bytes"), size_text(found[name]))
    console.print(facts)
    for what in ("operators", "bases", "logs", "segments"):
        rows = found[what]
        if not rows:
            continue
        left = f", the last {_SHOWN_ROWS} (all with --json)" if len(rows) > _SHOWN_ROWS else ""
        table = Table(title=f"{len(rows)} {what}{left}")
        columns = [column for column in rows[0] if column != "states"]
        for column in columns:
            table.add_column(column.replace("_", " "))
        for row in rows[-_SHOWN_ROWS:]:
            table.add_row(*(size_text(row[c]) if c == "size" else str(row[c]) for c in columns))
        console.print(table)
