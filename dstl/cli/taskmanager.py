"""``dstl taskmanager``: one TaskManager, run as a service of its own."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import signal
import socket
import sys
from typing import Annotated

import typer

from dstl.cli import console
from dstl.errors import Invalid
from dstl.metrics import MetricSet
from dstl.monitoring.exposition import CONTENT_TYPE, Exposition, Labelled
from dstl.monitoring.server import PageServer, Reply
from dstl.process.launch_spec import LaunchSpec
from dstl.process.lifecycle import ProcessLife, tune_process
from dstl.rpc.client import Address
from dstl.rpc.protocol import Secret
from dstl.taskmanager.process_metrics import process_sample

_SECRET = "DSTL_SECRET"
_LOG_LEVEL = "DSTL_LOG_LEVEL"


def taskmanager(
    coordinator: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Where the driver listens: its options cluster.host and port.")
    ],
    secret_file: Annotated[
        str | None,
        typer.Option(
            help="File with the application's secret, the same as the driver's option cluster.secret_file; its owner "
            f"alone may read it. Without it the secret is ${_SECRET} or, with -, the first line of standard input."
        ),
    ] = None,
    host: Annotated[
        str | None,
        typer.Option(
            help="Address of this host as executors and the driver reach it; it listens there. Where executors run on "
            "this host too, give what Spark calls it, so that they use the unix socket. Default: the address that "
            "reaches the coordinator."
        ),
    ] = None,
    wait: Annotated[
        str, typer.Option(help="How long to try again while no coordinator answers: 90s, 15m, 24h or 7d.")
    ] = "60s",
    metrics_port: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=65535,
            help="Serve this TaskManager's metrics for Prometheus at this port of --metrics-host (extra prometheus), "
            "0 for any free one. The driver's endpoint has those of all TaskManagers without it.",
        ),
    ] = None,
    metrics_host: Annotated[
        str, typer.Option(help="Address for --metrics-port; it asks for no password.")
    ] = "127.0.0.1",
    as_json: console.AsJson = False,
) -> None:
    """Run one TaskManager until its application ends.

    The coordinator tells it everything but the secret; credentials for S3 come from this host's own provider chain.
    When the coordinator has given it up because it did not answer in time, it drops its state and enlists again. Let a
    supervisor start it again when it ends: it then serves the next driver. --json prints one line when it starts and
    one when it ends; its log goes to standard error.

    Exit codes: 0 the application has ended; 2 refused (arguments, secret, version); 3 no coordinator answers.
    """
    logging.basicConfig(
        level=os.environ.get(_LOG_LEVEL, "INFO"),
        format="%(asctime)s %(levelname)s taskmanager[%(process)d] %(message)s",
    )
    with console.errors_as_exit():
        where = Address.parse(coordinator)
        secret = _secret(secret_file)
        retry_s = console.parse_duration(wait)
        own = host or _own_address(where)
        name = f"{own}-{secrets.token_hex(4)}"
        spec = LaunchSpec(name, where, secret, host=own, bind=own, retry_s=retry_s)
        metrics, recorder = None, MetricSet()
        if metrics_port is not None:
            metrics = _serve_metrics(recorder, name, metrics_host, metrics_port)
        try:
            if as_json:
                started = {"event": "started", "member": name, "host": own, "pid": os.getpid()}
                console.print_json(started | ({"metrics": f"{metrics.url}metrics"} if metrics else {}))
            asyncio.run(_serve(spec, recorder))
        finally:
            if metrics is not None:
                metrics.close()
    if as_json:
        console.print_json({"event": "ended", "member": name, "host": own, "pid": os.getpid()})


def _serve_metrics(recorder: MetricSet, name: str, host: str, port: int) -> PageServer:
    exposition = Exposition(lambda: [Labelled({"task_manager": name}, process_sample(recorder), "taskmanager")])
    return PageServer({"/metrics": lambda _: Reply(exposition.render(), CONTENT_TYPE)}, host, port)


async def _serve(spec: LaunchSpec, recorder: MetricSet) -> None:
    ended = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, ended.set)
    tune_process()
    await ProcessLife(spec, recorder).run(ended)


def _secret(file: str | None) -> Secret:
    """Return the secret, which is never an argument: those are in the process list."""
    if file == "-":
        try:
            return Secret.from_text(sys.stdin.readline())
        except UnicodeError:
            raise Invalid("the first line of standard input is not a secret: it is not UTF-8 text") from None
    if file is not None:
        return Secret.from_file(file)
    text = os.environ.pop(_SECRET, "")
    if not text:
        raise Invalid(f"no secret: pass --secret-file FILE (or - for standard input), or set {_SECRET}")
    return Secret.from_text(text)


def _own_address(coordinator: Address) -> str:
    """Return the address of this host on the way to the coordinator; nothing is sent for it."""
    try:
        family, kind, _, _, target = socket.getaddrinfo(coordinator.host, coordinator.port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(target)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise Invalid(f"the host of --coordinator {coordinator} is not known here: {error.strerror}") from None
