"""``dstl files``: list, verify, export, roll back, fork and migrate checkpoint directories of Spark."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Annotated, TypeVar

import typer

from dstl.cli import console
from dstl.cli.migrate import migrate
from dstl.files.forking import fork as make_fork
from dstl.files.forking import release
from dstl.files.inspection import CheckpointFiles, export_files, opened_files, roll_back, verify_files
from dstl.files.namespace import is_of_a_backend
from dstl.monitoring.text import size_text
from dstl.options import SealingOptions
from dstl.runtime import closed_after, system_runtime
from dstl.store import open_store

app = console.group("Checkpoint directories of Spark's own operators, on dstl://. List, verify and export only read.")
console.command(app)(migrate)

Root = Annotated[str, typer.Argument(metavar="DIRECTORY", help="As in checkpointLocation: dstl://bucket/path.")]
Also = Annotated[
    list[str] | None,
    typer.Option(
        metavar="DIRECTORY",
        help="A directory elsewhere that this one was forked from: dstl://... Repeatable. Those of the same bucket or "
        "parent directory need not be named.",
    ),
]
T = TypeVar("T")


@console.command(app, "list")
def list_(
    directory: Root, also: Also = None, endpoint_url: console.EndpointUrl = None, wide: console.Wide = False
) -> console.Answer:
    """List the committed files of DIRECTORY."""

    async def work(files: CheckpointFiles) -> CheckpointFiles:
        return files

    files = _at(directory, also, endpoint_url, work)
    rows = [
        {"path": each.path, "size": each.size, "modified_ms": each.modified_ms, "object": each.segment.name}
        for each in files.entries.values()
    ]
    found = {"directory": directory, "batches": files.batches, "files": rows, "elsewhere": files.elsewhere}
    return console.Answer(found, lambda: _show_list(directory, files, wide))


def _show_list(directory: str, files: CheckpointFiles, wide: bool) -> None:
    title = f"{len(files.entries)} files of {directory}, batches {files.batches[0] if files.batches else '-'}"
    title += f" to {files.batches[-1]}" if len(files.batches) > 1 else ""
    table = console.new_table(title, (("path", "left"), ("size", "right"), ("object", "left")))
    for each in files.entries.values():
        console.add_row(table, each.path, size_text(each.size), each.segment.name)
    console.print_table(table, wide=wide)
    for location, is_opened in files.elsewhere.items():
        note = "" if is_opened else ", which is NOT opened: neither its bucket's nor beside it, and not named by --also"
        typer.echo(console.printable(f"has objects of {location}{note}"))


@console.command(app)
def verify(directory: Root, also: Also = None, endpoint_url: console.EndpointUrl = None) -> console.Answer:
    """Read every byte of every file of DIRECTORY and report each that is damaged or missing."""
    with console.progress_bar("verifying") as on_progress:

        async def work(files: CheckpointFiles) -> tuple[int, list[str]]:
            return len(files.entries), await verify_files(files, on_progress)

        count, problems = _at(directory, also, endpoint_url, work)

    def show() -> None:
        for problem in problems:
            typer.echo(f"DAMAGED {console.printable(problem)}")
        typer.echo(f"{count} files: " + (f"{len(problems)} PROBLEMS" if problems else "all sound"))

    found = {"ok": not problems, "directory": directory, "files": count, "problems": problems}
    return console.Answer(found, show, not problems)


@console.command(app)
def export(
    directory: Root,
    target: Annotated[str, typer.Argument(metavar="TARGET", help="An empty directory, or s3://bucket/prefix.")],
    also: Also = None,
    endpoint_url: console.EndpointUrl = None,
) -> console.Answer:
    """Write DIRECTORY as plain files, which Spark opens without DSTL, and which carry no seal."""
    with console.progress_bar("exporting") as on_progress:

        async def work(files: CheckpointFiles) -> tuple[int, int]:
            # Spark itself is to read it, which knows of no seal.
            plain = open_store(target, console.s3_options(endpoint_url), SealingOptions())
            async with closed_after(plain):
                return len(files.entries), await export_files(files, plain, on_progress)

        count, nbytes = _at(directory, also, endpoint_url, work)
    found = {"directory": directory, "target": target, "files": count, "bytes": nbytes}
    use = f"use {target} as checkpointLocation"
    if is_of_a_backend(directory):
        use = "to go on from them, put them at _spark below a StateBackend's location, and restore_from= their state"
    return console.Answer(found, f"{count} files, {size_text(nbytes)}: {use}")


@console.command(app)
def rollback(
    directory: Root,
    batch: Annotated[int, typer.Argument(min=0, metavar="BATCH", help="The last batch that stays committed.")],
    endpoint_url: console.EndpointUrl = None,
) -> console.Answer:
    """Forget the batches of DIRECTORY behind BATCH: the query's next run goes on there. A running query is fenced."""
    gone = asyncio.run(roll_back(directory, batch, system_runtime(), console.opener(endpoint_url)))
    found = {"directory": directory, "batch": batch, "removed": gone}
    return console.Answer(found, f"{directory} goes on behind batch {batch}; {len(gone)} files are gone")


@console.command(app)
def fork(
    directory: Root,
    target: Annotated[str, typer.Argument(metavar="TARGET", help="An empty directory: dstl://bucket/path.")],
    also: Also = None,
    endpoint_url: console.EndpointUrl = None,
) -> console.Answer:
    """Let TARGET begin with the files of DIRECTORY, without copying one. A query that runs in DIRECTORY is fenced.

    Both go their own way from then on. Neither deletes an object that the other needs: DIRECTORY keeps what TARGET
    began with until it is released. Where DIRECTORY is a fork itself, name what it was forked from with --also: that is
    taken over as well.
    """
    made = asyncio.run(make_fork(directory, target, system_runtime(), console.opener(endpoint_url), also or ()))

    def show() -> None:
        typer.echo(console.printable(f"{target} begins with what {directory} has; batches: {made.batches}"))
        if made.also:
            typer.echo(console.printable(f"its query needs spark.dstl.also={','.join(made.also)}"))

    found = {"directory": directory, "target": target, "batches": made.batches, "also": made.also}
    return console.Answer(found, show)


@console.command(app, "release")
def release_(
    directory: Root,
    target: Annotated[str, typer.Argument(metavar="TARGET", help="A fork of it that was deleted.")],
    endpoint_url: console.EndpointUrl = None,
) -> console.Answer:
    """Let DIRECTORY go of what it keeps for its fork TARGET, which was deleted. A running query is fenced."""
    count = asyncio.run(release(directory, target, system_runtime(), console.opener(endpoint_url)))
    found = {"directory": directory, "target": target, "objects": count}
    return console.Answer(found, f"{directory} has let go of {count} objects")


def _at(
    root: str, also: list[str] | None, endpoint_url: str | None, work: Callable[[CheckpointFiles], Awaitable[T]]
) -> T:
    async def run() -> T:
        async with opened_files(root, system_runtime(), console.opener(endpoint_url), also or ()) as files:
            return await work(files)

    return asyncio.run(run())
