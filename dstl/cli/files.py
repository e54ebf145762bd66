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
from dstl.runtime import Runtime, system_runtime
from dstl.store import open_store

__all__ = ["app"]

app = typer.Typer(
    help="Checkpoint directories of Spark's own operators, on dstl://. List, verify and export only read.",
    epilog=console.EXIT_CODES,
    no_args_is_help=True,
)

app.command(epilog=console.EXIT_CODES)(migrate)

Root = Annotated[str, typer.Argument(metavar="DIRECTORY", help="As in checkpointLocation: dstl://bucket/path.")]
T = TypeVar("T")


@app.command("list", epilog=console.EXIT_CODES)
def list_(
    directory: Root,
    endpoint_url: console.EndpointUrl = None,
    wide: console.Wide = False,
    as_json: console.AsJson = False,
) -> None:
    """List the committed files of DIRECTORY."""

    async def work(files: CheckpointFiles, runtime: Runtime) -> CheckpointFiles:
        return files

    with console.errors_as_exit():
        files = _at(directory, endpoint_url, work)
    rows = [
        {"path": each.path, "size": each.size, "modified_ms": each.modified_ms, "object": each.segment.name}
        for each in files.entries.values()
    ]
    if as_json:
        console.print_json({"directory": directory, "batches": files.batches, "files": rows})
        return
    title = f"{len(rows)} files of {directory}, batches {files.batches[0] if files.batches else '-'}"
    title += f" to {files.batches[-1]}" if len(files.batches) > 1 else ""
    table = console.new_table(title, (("path", "left"), ("size", "right"), ("object", "left")))
    for row in rows:
        console.add_row(table, row["path"], console.size_text(float(str(row["size"]))), row["object"])
    console.print_table(table, wide=wide)


@app.command(epilog=console.EXIT_CODES)
def verify(directory: Root, endpoint_url: console.EndpointUrl = None, as_json: console.AsJson = False) -> None:
    """Read every byte of every file of DIRECTORY and report each that is damaged or missing."""
    with console.errors_as_exit(), console.progress_bar("verifying") as on_progress:

        async def work(files: CheckpointFiles, runtime: Runtime) -> tuple[int, list[str]]:
            return len(files.entries), await verify_files(files, on_progress)

        count, problems = _at(directory, endpoint_url, work)
    if as_json:
        console.print_json({"ok": not problems, "directory": directory, "files": count, "problems": problems})
    else:
        for problem in problems:
            typer.echo(f"DAMAGED {console.printable(problem)}")
        typer.echo(f"{count} files: " + (f"{len(problems)} PROBLEMS" if problems else "all sound"))
    if problems:
        raise typer.Exit(1)


@app.command(epilog=console.EXIT_CODES)
def export(
    directory: Root,
    target: Annotated[str, typer.Argument(metavar="TARGET", help="An empty directory, or s3://bucket/prefix.")],
    endpoint_url: console.EndpointUrl = None,
    as_json: console.AsJson = False,
) -> None:
    """Write DIRECTORY as plain files, which Spark opens without DSTL."""
    with console.errors_as_exit(), console.progress_bar("exporting") as on_progress:

        async def work(files: CheckpointFiles, runtime: Runtime) -> tuple[int, int]:
            plain = open_store(target, console.s3_options(endpoint_url))
            try:
                return len(files.entries), await export_files(files, plain, on_progress)
            finally:
                await plain.close()

        count, nbytes = _at(directory, endpoint_url, work)
    if as_json:
        console.print_json({"directory": directory, "target": target, "files": count, "bytes": nbytes})
    else:
        typer.echo(f"{count} files, {console.size_text(nbytes)}: use {console.printable(target)} as checkpointLocation")


@app.command(epilog=console.EXIT_CODES)
def rollback(
    directory: Root,
    batch: Annotated[int, typer.Argument(min=0, metavar="BATCH", help="The last batch that stays committed.")],
    endpoint_url: console.EndpointUrl = None,
    as_json: console.AsJson = False,
) -> None:
    """Forget the batches of DIRECTORY behind BATCH: the query's next run goes on there. A running query is fenced."""
    with console.errors_as_exit():
        gone = asyncio.run(roll_back(directory, batch, system_runtime(), console.s3_options(endpoint_url)))
    if as_json:
        console.print_json({"directory": directory, "batch": batch, "removed": gone})
    else:
        typer.echo(f"{console.printable(directory)} goes on behind batch {batch}; {len(gone)} files are gone")


@app.command(epilog=console.EXIT_CODES)
def fork(
    directory: Root,
    target: Annotated[str, typer.Argument(metavar="TARGET", help="An empty directory: dstl://bucket/path.")],
    endpoint_url: console.EndpointUrl = None,
    as_json: console.AsJson = False,
) -> None:
    """Let TARGET begin with the files of DIRECTORY, without copying one. A query that runs in DIRECTORY is fenced.

    Both go their own way from then on. Neither deletes an object that the other needs: DIRECTORY keeps what TARGET
    began with until it is released.
    """
    with console.errors_as_exit():
        batches = asyncio.run(make_fork(directory, target, system_runtime(), console.s3_options(endpoint_url)))
    if as_json:
        console.print_json({"directory": directory, "target": target, "batches": batches})
    else:
        typer.echo(f"{console.printable(target)} has the {batches} batches of {console.printable(directory)}")


@app.command("release", epilog=console.EXIT_CODES)
def release_(
    directory: Root,
    target: Annotated[str, typer.Argument(metavar="TARGET", help="A fork of it that was deleted.")],
    endpoint_url: console.EndpointUrl = None,
    as_json: console.AsJson = False,
) -> None:
    """Let DIRECTORY go of what it keeps for its fork TARGET, which was deleted. A running query is fenced."""
    with console.errors_as_exit():
        count = asyncio.run(release(directory, target, system_runtime(), console.s3_options(endpoint_url)))
    if as_json:
        console.print_json({"directory": directory, "target": target, "objects": count})
    else:
        typer.echo(f"{console.printable(directory)} has let go of {count} objects")


def _at(root: str, endpoint_url: str | None, work: Callable[[CheckpointFiles, Runtime], Awaitable[T]]) -> T:
    async def run() -> T:
        runtime = system_runtime()
        async with opened_files(root, runtime, console.s3_options(endpoint_url)) as files:
            return await work(files, runtime)

    return asyncio.run(run())
