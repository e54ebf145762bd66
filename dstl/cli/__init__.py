"""The dstl command line: one module per verb, no logic of its own."""

from __future__ import annotations

import inspect
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import typer

__all__ = ["application", "main"]


def main() -> None:
    """Run the command line."""
    import typer

    from dstl.cli.console import errors_as_exit, open_output

    open_output()
    try:
        with errors_as_exit():  # of help texts, which no command prints
            application()()
    except typer.Exit as ended:
        sys.exit(ended.exit_code)


def application() -> typer.Typer:
    """Return the command line, for its reference and for programs that run commands within themselves."""
    from importlib.metadata import version

    import typer

    from dstl.cli.checkpoints import app as checkpoints
    from dstl.cli.demo import demo
    from dstl.cli.files import app as files
    from dstl.cli.gc import gc
    from dstl.cli.savepoint import app as savepoint
    from dstl.cli.segment import app as segment
    from dstl.cli.state import app as state
    from dstl.cli.taskmanager import taskmanager
    from dstl.cli.ui import ui

    app = typer.Typer(
        help="DSTL: a durable short-term log as the state backend of PySpark Structured Streaming.",
        no_args_is_help=True,
        # A traceback is no place for what variables hold: one of them is the secret.
        pretty_exceptions_show_locals=False,
    )

    def show_version(asked: bool) -> None:
        if asked:
            typer.echo(f"dstl {version('dstl-pyspark')}")
            raise typer.Exit

    @app.callback()
    def options(
        version: bool = typer.Option(
            False, "--version", callback=show_version, is_eager=True, help="Print the version and end."
        ),
    ) -> None:
        pass

    app.command()(demo)
    app.command()(gc)
    app.command()(taskmanager)
    app.command()(ui)
    app.add_typer(checkpoints, name="checkpoints")
    app.add_typer(files, name="files")
    app.add_typer(savepoint, name="savepoint")
    app.add_typer(segment, name="segment")
    app.add_typer(state, name="state")
    _flow(app)
    return app


def _flow(app: typer.Typer) -> None:
    """Let each paragraph of a help text fill the terminal's lines: typer keeps those of the source."""
    for command in app.registered_commands:
        text = command.help or inspect.getdoc(command.callback) or ""
        command.help = "\n\n".join(" ".join(paragraph.split()) for paragraph in text.split("\n\n"))
    for group in app.registered_groups:
        if group.typer_instance is not None:
            _flow(group.typer_instance)
