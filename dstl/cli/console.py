"""The commands' common parts: locations, exit codes, progress bars, tables, sizes and times.

Everything that a location holds is somebody's data: names and values reach the terminal as they are stored, never as
markup and never as control sequences, through :func:`printable`, :func:`new_table` and :func:`add_row`.
"""

from __future__ import annotations

import asyncio
import inspect
import io
import json
import os
import re
import sys
import unicodedata
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial, wraps
from typing import IO, TYPE_CHECKING, Annotated, Any, Concatenate, NamedTuple, ParamSpec, TypeVar

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from dstl.checkpoint.savepoint.deletion import list_savepoints
from dstl.errors import CorruptData, DstlError, Invalid, MissingState, OutcomeUnknown, Unavailable
from dstl.option_sources import resolve
from dstl.options import S3Options, SealingOptions
from dstl.runtime import Runtime, closed_after, system_runtime
from dstl.store.base import ObjectStore
from dstl.store.location import absolute_location, open_store

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

EXIT_CODES = (
    "Exit codes: 0 done, nothing wrong; 1 something is damaged or missing; 2 refused (arguments, configuration, "
    "credentials, a name that is taken); 3 the store did not answer: try again."
)

Location = Annotated[str, typer.Argument(metavar="LOCATION", help="A directory, or s3://bucket/prefix.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON on standard output, for programs.")]
EndpointUrl = Annotated[
    str | None,
    typer.Option(help="Endpoint of an S3 other than AWS's, as http://host:port. Default: DSTL_S3_ENDPOINT_URL."),
]
Wide = Annotated[bool, typer.Option("--wide", help="All columns, as wide as they are; without it, what fits.")]

P = ParamSpec("P")
T = TypeVar("T")

_DURATION = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*(s|m|min|h|d)")
_SECONDS = {"s": 1, "m": 60, "min": 60, "h": 3600, "d": 86_400}
"""Of each unit."""
_UNBOUNDED = 10_000
"""Columns: rich has no way to say that a table has no limit, and no table here comes near it."""
STANDARD_OUTPUT = "standard output"
"""The file name of its errors."""
SHOWN_ROWS = 20
"""Rows of a long list on a terminal, which has 24 lines unless it says otherwise; ``--json`` has all."""
# Characters that change the direction of text, and so can show a name as another one.
_BIDIRECTIONAL = frozenset("\u200e\u200f\u061c\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")


class Answer(NamedTuple):
    """The answer of a command.

    Attributes:
        found: For programs, with ``--json``.
        show: For people: a line, or what prints more.
        is_sound: False where something is damaged or missing: exit code 1.
    """

    found: Any
    show: str | Callable[[], object]
    is_sound: bool = True


def answering(work: Callable[..., Answer]) -> Callable[..., None]:
    """Return the command that prints what a function answers: it takes ``--json``, and its errors are exit codes."""

    @wraps(work)
    def command(*, as_json: bool, **given: Any) -> None:
        with errors_as_exit():
            answer = work(**given)
            if as_json:
                print_json(answer.found)
            elif isinstance(answer.show, str):
                typer.echo(printable(answer.show))
            else:
                answer.show()
        if not answer.is_sound:
            raise typer.Exit(1)

    known = inspect.signature(work, eval_str=True)
    added = inspect.Parameter("as_json", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=AsJson)
    command.__signature__ = known.replace(parameters=[*known.parameters.values(), added])  # type: ignore[attr-defined]
    command.__annotations__ = {**work.__annotations__, "as_json": AsJson}
    return command


def group(help_text: str) -> typer.Typer:
    """Return a group of commands."""
    return typer.Typer(help=help_text, epilog=EXIT_CODES, no_args_is_help=True)


def command(of: typer.Typer, name: str | None = None) -> Callable[[Callable[..., Answer]], Callable[..., None]]:
    """Add to a group the command that :func:`answering` makes of a function."""
    return lambda work: of.command(name, epilog=EXIT_CODES)(answering(work))


def parse_duration(text: str) -> float:
    """Return the seconds of ``90s``, ``15m``, ``24h`` or ``7d``.

    Raises:
        Invalid: Not a duration.
    """
    found = _DURATION.fullmatch(text.strip())
    if found is None:
        raise Invalid(f"not a duration: {text!r}; write 90s, 15m, 24h or 7d")
    return float(found[1]) * _SECONDS[found[2]]


def printable(value: object) -> str:
    """Return a stored value as a terminal may get it: control characters are written out, as ``\\x1b``."""
    return "".join(each if _is_plain(each) else each.encode("unicode_escape").decode() for each in str(value))


def _is_plain(character: str) -> bool:
    return (character.isascii() and character.isprintable()) or (
        unicodedata.category(character) not in ("Cc", "Cs", "Zl", "Zp") and character not in _BIDIRECTIONAL
    )


def new_table(title: str, columns: Iterable[tuple[str, str]] | None = None) -> Table:
    """Return a table; without columns it gets two, of names and values, and no head.

    Args:
        title: What it shows.
        columns: Title of each column, and how it is set: ``left`` wraps its values and loses nothing of them, ``right``
            is for numbers, which are never wrapped.
    """
    table = Table(title=Text(printable(title)), show_header=columns is not None)
    for name, justify in columns or (("", "left"), ("", "left")):
        if justify == "right":
            table.add_column(Text(printable(name)), justify="right", no_wrap=True)
        else:
            table.add_column(Text(printable(name)), overflow="fold")
    return table


def add_row(table: Table, *values: object) -> None:
    """Add a row of stored values; a tuple is shown one value below the other."""
    table.add_row(*(Text("\n".join(map(printable, v)) if isinstance(v, tuple) else printable(v)) for v in values))


def print_table(table: Table, *, wide: bool = False, file: IO[str] | None = None) -> None:
    """Print a table, within the terminal's width (80 without a terminal) or as wide as its values are."""
    Console(file=file, width=_UNBOUNDED if wide else None, soft_wrap=True).print(table)


class _StandardOutput(io.FileIO):
    """Standard output, whose errors say that they are of it: those of a socket, say, name no file either."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            error.filename = STANDARD_OUTPUT
            raise


def open_output() -> None:
    """Open standard output and error for what is stored, which may have what the terminal's encoding has not."""
    if isinstance(sys.stderr, io.TextIOWrapper):
        sys.stderr.reconfigure(errors="backslashreplace")
    before = sys.stdout
    if before is None:  # who has started the command has closed it
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    elif isinstance(before, io.TextIOWrapper):
        raw = _StandardOutput(before.fileno(), "w", closefd=False)
        sys.stdout = io.TextIOWrapper(
            io.BufferedWriter(raw), before.encoding, "backslashreplace", line_buffering=before.line_buffering
        )


@contextmanager
def errors_as_exit() -> Iterator[None]:
    """Turn an error of ours, or a full disk behind standard output, into a line on standard error and an exit code."""
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except OSError as error:
        if error.filename == STANDARD_OUTPUT:
            if isinstance(error, BrokenPipeError):
                raise  # of one who has read enough: typer ends the command without a word
            # What is left in the buffer is written at the exit, which would fail again, with an exit code of Python's.
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        place = "" if error.filename is None else f"{error.filename}: "
        typer.echo(f"Invalid: {printable(place)}{error.strerror or error}", err=True)
        raise typer.Exit(2) from None
    except DstlError as error:
        typer.echo(f"{type(error).__name__}: {printable(error)}", err=True)
        if isinstance(error, (CorruptData, MissingState)):
            raise typer.Exit(1) from None
        raise typer.Exit(3 if isinstance(error, (Unavailable, OutcomeUnknown)) else 2) from None


def run_at(
    location: str,
    endpoint_url: str | None,
    work: Callable[Concatenate[ObjectStore, Runtime, P], Awaitable[T]],
    *args: P.args,
    **kwargs: P.kwargs,
) -> T:
    """Open a location, do something with its store and these arguments, close it, and return what it gave.

    Raises:
        Invalid: The location is none of DSTL.
        DstlError: As what is done.
    """

    async def run() -> T:
        store = open_at(location, endpoint_url)
        async with closed_after(store):
            try:
                return await work(store, system_runtime(), *args, **kwargs)
            except MissingState:
                await list_savepoints(store, system_runtime())  # of a wrong location everything is missing
                raise

    return asyncio.run(run())


def open_at(location: str, endpoint_url: str | None) -> ObjectStore:
    """Open a location's store, with the key that ``DSTL_SEALING_KEY_FILE`` names where its objects are sealed."""
    return open_store(absolute_location(location), s3_options(endpoint_url), sealing_options())


def opener(endpoint_url: str | None) -> Callable[[str], ObjectStore]:
    """Return :func:`open_at` of one endpoint."""
    return partial(open_at, endpoint_url=endpoint_url)


def sealing_options() -> SealingOptions:
    """Return the options of sealing: ``DSTL_SEALING_KEY_FILE`` names the key."""
    return resolve("sealing", SealingOptions, None, os.environ, {})


def s3_options(endpoint_url: str | None) -> S3Options:
    """Return the options of S3: ``DSTL_S3_*``, and ``--endpoint-url``, an impossible one of which ends the command."""
    options = resolve("s3", S3Options, None, os.environ, {})
    try:
        return options if endpoint_url is None else S3Options(**dict(options) | {"endpoint_url": endpoint_url})
    except ValueError:
        typer.echo("Invalid: --endpoint-url is http://host:port or https://host:port, without user or secret", err=True)
        raise typer.Exit(2) from None


@contextmanager
def progress_bar(what: str, then: str = "", *, shown: bool = True) -> Iterator[Callable[[int, int], None]]:
    """Show a bar on standard error while something long runs; yields what takes (done, in all).

    Print nothing before it is gone. Nothing is shown where standard error is no terminal.

    Args:
        what: What it stands beside.
        then: What takes its place at the first progress.
        shown: Off: nothing is shown, for something else is printed meanwhile.
    """
    console = Console(stderr=True)
    with Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
        disable=not (shown and console.is_terminal),
        transient=True,
    ) as progress:
        bar = progress.add_task(printable(what), total=None)
        yield lambda done, total: progress.update(bar, completed=done, total=total, description=printable(then or what))


def print_json(value: Any) -> None:
    """Print one JSON value on one line."""
    typer.echo(json.dumps(value))


def pairs(given: Sequence[str] | None, option: str) -> dict[str, str]:
    """Return what a repeatable option of the form ``NAME=VALUE`` was given.

    Raises:
        Invalid: One of them is of another form.
    """
    found = {}
    for each in given or ():
        key, separator, value = each.partition("=")
        if not key or not separator or not value:
            raise Invalid(f"{option} {each!r} is not of the form NAME=VALUE")
        found[key] = value
    return found


def spark_session(conf: Mapping[str, str], places: Sequence[str] = ()) -> SparkSession:
    """Return a session of Spark for this command.

    Args:
        conf: Settings of it.
        places: Directories that it is to read and write; ``dstl:`` takes our jar.
    """
    from pyspark.sql import SparkSession

    from dstl.spark import jar_path

    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    builder = SparkSession.builder.config("spark.ui.enabled", "false").config("spark.log.level", "ERROR")
    builder = builder.config("spark.ui.showConsoleProgress", "false")
    if any(each.startswith("dstl:") for each in places):
        builder = builder.config("spark.jars", jar_path()).config("spark.plugins", "dstl.spark.DstlPlugin")
        builder = builder.config("spark.dstl.python", sys.executable)
    for key, value in conf.items():
        builder = builder.config(key, value)
    return builder.getOrCreate()
