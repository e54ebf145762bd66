"""``dstl ui``: the page of a location, from its store alone."""

from __future__ import annotations

import os
import signal
import threading
from contextlib import closing
from typing import Annotated

import typer

from dstl.cli import console
from dstl.errors import Invalid
from dstl.monitoring.page import Page, assets
from dstl.monitoring.server import PageServer
from dstl.monitoring.store_reader import StoreReader
from dstl.runtime import IoLoop, system_runtime
from dstl.store.location import absolute_location, has_scheme, split_locations

_ANSWER_S = 60.0
"""Longer than the attempts of a read at a store that does not answer: its own error is shown then."""
_PORT = 8158
"""Ends with the number of FLIP-158; above the ports that need a privilege."""


def ui(
    location: console.Location,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port of the page; 0 for any free one.")] = _PORT,
    host: Annotated[
        str, typer.Option(help="Address to listen at. Beyond the loopback, anyone who can reach it can look.")
    ] = "127.0.0.1",
    poll: Annotated[
        str, typer.Option(help="How often an open page looks again: 5s, 1m. Each look costs some five requests.")
    ] = "5s",
    endpoint_url: console.EndpointUrl = None,
    as_json: console.AsJson = False,
) -> None:
    """Show a location's checkpoints, operators, restores, savepoints and cost as a page.

    Only reads: it is safe beside a running job. The driver's own page (the option metrics.port) knows more.

    Runs until it is interrupted; --json prints one line with the page's address. The page needs the extra ui.

    Exit codes: 0 interrupted; 1 something is damaged; 2 refused (no such directory, arguments, credentials, the port
    is taken); 3 the store did not answer: try again.
    """
    with console.errors_as_exit():
        page = Page(console.parse_duration(poll))
        _check_directories(location)
        loop, runtime = IoLoop("dstl-ui"), system_runtime()
        store = console.open_at(location, endpoint_url)
        with loop.closing(store):
            reader = StoreReader(store, runtime)
            found = loop.run(reader.overview(), _ANSWER_S)
            routes = {"/": lambda asked: page.render(loop.run(reader.overview(), _ANSWER_S), asked), **assets()}
            with closing(PageServer(routes, host, port)) as server:
                if as_json:
                    console.print_json({"url": server.url, "location": store.location, "query_id": found.query_id})
                else:
                    if not found.query_id:
                        typer.echo(f"{console.printable(location)} is empty so far: no query has used it", err=True)
                    typer.echo(f"{server.url} shows {console.printable(location)}; ctrl-C ends it")
                _wait_for_interrupt()


def _check_directories(location: str) -> None:
    """Refuse a directory that does not exist: a typing error would look like an empty location."""
    for one in split_locations(absolute_location(location)):
        if not has_scheme(one) and not os.path.isdir(one):
            raise Invalid(f"there is no directory {one}: give the location that StateBackend(...) was given")


def _wait_for_interrupt() -> None:
    ended = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ended.set())
    ended.wait()
