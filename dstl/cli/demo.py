"""``dstl demo``: the main job, killed and recovered, compared with a plain computation."""

from __future__ import annotations

import json
import secrets
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from dstl.errors import DstlError

__all__ = ["demo"]


def demo(
    store: Annotated[
        str | None, typer.Option(help="Where state goes: a directory or s3://bucket/prefix. Default: a temporary one.")
    ] = None,
    endpoint_url: Annotated[str | None, typer.Option(help="Endpoint of another S3 than AWS's.")] = None,
    partitions: Annotated[int, typer.Option(min=1, max=128, help="Partitions of the stateful operator.")] = 4,
    batches: Annotated[int, typer.Option(min=1, max=1000, help="Micro-batches the year is split into.")] = 12,
    kill: Annotated[str, typer.Option(help="none, worker, taskmanager, driver or all.")] = "none",
    task_managers: Annotated[int, typer.Option(min=1, max=16, help="TaskManager processes.")] = 1,
    master: Annotated[
        str | None, typer.Option(help="Spark's master, as spark://host:7077. Default: this machine.")
    ] = None,
    work: Annotated[
        str | None,
        typer.Option(help="Directory for input, output and checkpoint; with --master one that its hosts share."),
    ] = None,
    seed: Annotated[
        int | None, typer.Option(help="Decides the moments of the kills; printed, so a run repeats.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object on standard output.")] = False,
) -> None:
    """Run 336,776 real flights through a stateful query, kill its processes, and compare state and output.

    Exit codes: 0 equal, 1 different, 2 refused (configuration, location, missing Java).
    """
    console = Console(stderr=True)
    try:
        from dstl.demo.main_job import run_demo
    except ModuleNotFoundError as error:
        console.print(f"[red]refused:[/red] {error.name} is not installed: pip install 'dstl-pyspark\\[demo]'")
        raise typer.Exit(2) from None
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        disable=not console.is_terminal,
    ) as progress:
        bar = progress.add_task("starting", total=batches)
        recovery = progress.add_task("recovering", total=None, visible=False)

        def restoring(done: int, total: int, line: str) -> None:
            progress.update(
                recovery, description=f"recovering: {line}", completed=done / 1e6, total=total / 1e6, visible=True
            )

        try:
            report = run_demo(
                store=store,
                endpoint_url=endpoint_url,
                partitions=partitions,
                batches=batches,
                kill=kill,
                seed=secrets.randbits(32) if seed is None else seed,
                task_managers=task_managers,
                master=master,
                work=work,
                on_progress=lambda stage, done: progress.update(bar, description=stage, completed=done),
                on_restore=restoring,
            )
        except DstlError as error:
            progress.stop()
            console.print(f"[red]refused:[/red] {error}", highlight=False, markup=True)
            raise typer.Exit(2) from None
    if as_json:
        print(json.dumps(report))
    else:
        _show(report)
    if not report["ok"]:
        raise typer.Exit(1)


def _show(report: dict[str, Any]) -> None:
    table = Table(title="dstl demo", show_header=False)
    for name, value in report.items():
        shown = f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
        table.add_row(name.replace("_", " "), shown)
    Console().print(table)
