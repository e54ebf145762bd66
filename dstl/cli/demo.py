"""``dstl demo``: the main job, killed and recovered, compared with a plain computation."""

from __future__ import annotations

import secrets
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from dstl.cli import console
from dstl.errors import Invalid


@console.answering
def demo(
    store: Annotated[
        str, typer.Option(help="Where state goes: a directory or s3://bucket/prefix. Default: a temporary one.")
    ] = "",
    endpoint_url: console.EndpointUrl = None,
    partitions: Annotated[int, typer.Option(min=1, max=128, help="Partitions of the stateful operator.")] = 4,
    batches: Annotated[int, typer.Option(min=1, max=1000, help="Micro-batches the year is split into.")] = 12,
    kill: Annotated[str, typer.Option(help="none, worker, taskmanager, driver or all.")] = "none",
    task_managers: Annotated[int, typer.Option(min=1, max=16, help="TaskManager processes.")] = 1,
    master: Annotated[
        str | None, typer.Option(help="Spark's master, as spark://host:7077. Default: this machine.")
    ] = None,
    work: Annotated[
        str, typer.Option(help="Directory for input, output and checkpoint; with --master one that its hosts share.")
    ] = "",
    seed: Annotated[int | None, typer.Option(help="Decides when kills come; printed, so that a run repeats.")] = None,
) -> console.Answer:
    """Run 336,776 real flights through a stateful query, kill its processes, and compare state and output.

    Exit codes: 0 equal; 1 different, or something is damaged; 2 refused (arguments, configuration, location, missing
    Java); 3 the store or the driver did not answer: try again.
    """
    try:
        from dstl.demo.job import JobConfig
        from dstl.demo.main_job import run_demo
    except ModuleNotFoundError as error:
        raise Invalid(f"{error.name} is not installed: pip install 'dstl-pyspark[demo]'") from None
    wanted = JobConfig(work, store, endpoint_url, partitions, task_managers, master)
    terminal = Console(stderr=True)
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=terminal,
        disable=not terminal.is_terminal,
    ) as progress:
        bar = progress.add_task("starting", total=batches)
        recovery = progress.add_task("recovering", total=None, visible=False)

        def restoring(done: int, total: int, line: str) -> None:
            progress.update(
                recovery, description=f"recovering: {line}", completed=done / 1e6, total=total / 1e6, visible=True
            )

        report = run_demo(
            wanted,
            batches=batches,
            kill=kill,
            seed=secrets.randbits(32) if seed is None else seed,
            on_progress=lambda stage, done: progress.update(bar, description=stage, completed=done),
            on_restore=restoring,
        )

    def show() -> None:
        table = console.new_table("dstl demo")
        for name, value in report.items():
            is_count = isinstance(value, int) and not isinstance(value, bool)
            console.add_row(table, name.replace("_", " "), f"{value:,}" if is_count else value)
        console.print_table(table)

    return console.Answer(report, show, report["ok"])
