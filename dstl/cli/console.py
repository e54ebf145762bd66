"""What the commands share: opening a location, exit codes, progress bars, and how sizes and times are written."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Annotated, Any, TypeVar

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from dstl.errors import CorruptData, DstlError, MissingState, OutcomeUnknown, Unavailable
from dstl.options import S3Options
from dstl.runtime import Runtime, system_runtime
from dstl.store.base import ObjectStore
from dstl.store.location import open_store

__all__ = [
    "EXIT_CODES",
    "AsJson",
    "EndpointUrl",
    "Location",
    "age_text",
    "errors_as_exit",
    "print_json",
    "progress_bar",
    "run_at",
    "size_text",
    "time_text",
]

EXIT_CODES = (
    "Exit codes: 0 done, nothing wrong; 1 something is damaged or missing; 2 refused (arguments, configuration, "
    "credentials, a name that is taken); 3 the store did not answer: try again."
)

Location = Annotated[str, typer.Argument(metavar="LOCATION", help="A directory, or s3://bucket/prefix.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON on standard output, for programs.")]
EndpointUrl = Annotated[str | None, typer.Option(help="Endpoint of another S3 than AWS's, as http://host:port.")]

T = TypeVar("T")


@contextmanager
def errors_as_exit() -> Iterator[None]:
    """Turn an error of ours into a line on standard error and an exit code."""
    try:
        yield
    except DstlError as error:
        typer.echo(f"{type(error).__name__}: {error}", err=True)
        if isinstance(error, (CorruptData, MissingState)):
            raise typer.Exit(1) from None
        raise typer.Exit(3 if isinstance(error, (Unavailable, OutcomeUnknown)) else 2) from None


def run_at(location: str, endpoint_url: str | None, work: Callable[[ObjectStore, Runtime], Awaitable[T]]) -> T:
    """Open a location, do something with it, close it, and return what it gave."""

    async def run() -> T:
        store = open_store(location, _s3(endpoint_url))
        try:
            return await work(store, system_runtime())
        finally:
            await store.close()

    return asyncio.run(run())


def _s3(endpoint_url: str | None) -> S3Options:
    try:
        return S3Options(endpoint_url=endpoint_url)
    except ValueError:
        typer.echo("Invalid: --endpoint-url is http://host:port or https://host:port, without user or secret", err=True)
        raise typer.Exit(2) from None


@contextmanager
def progress_bar(what: str) -> Iterator[Callable[[int, int], None]]:
    """Show a bar on standard error while something long runs; yields what takes (done, in all).

    Nothing is shown where standard error is no terminal.
    """
    console = Console(stderr=True)
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
        disable=not console.is_terminal,
        transient=True,
    ) as progress:
        bar = progress.add_task(what, total=None)
        yield lambda done, total: progress.update(bar, completed=done, total=total)


def print_json(value: Any) -> None:
    """Print one JSON value on one line."""
    typer.echo(json.dumps(value))


def size_text(count: float) -> str:
    """Return a number of bytes as people write it: ``512 B``, ``3.2 MB``."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" or count >= 100 else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def age_text(seconds: float) -> str:
    """Return a duration as people write it: ``41 s``, ``3 h 20 min``, ``12 d``."""
    whole = max(0, int(seconds))
    if whole < 120:
        return f"{whole} s"
    if whole < 7200:
        return f"{whole // 60} min"
    if whole < 172_800:
        return f"{whole // 3600} h {whole % 3600 // 60} min"
    return f"{whole // 86_400} d"


def time_text(unix_seconds: float) -> str:
    """Return a moment in UTC, to the second."""
    return datetime.fromtimestamp(unix_seconds, UTC).strftime("%Y-%m-%d %H:%M:%SZ")
