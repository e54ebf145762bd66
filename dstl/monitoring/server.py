"""A small HTTP server for metrics and the page: GET only, on a thread of its own, by the standard library."""

from __future__ import annotations

import ipaddress
import logging
import socket
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from dstl.errors import DstlError, Invalid
from dstl.runtime import SystemClock

_log = logging.getLogger(__name__)
_MOST_CONNECTIONS = 32
"""A scraper and some open pages have a few. Each takes a thread and a descriptor of the driver."""
_SILENT_S = 5.0
"""For a request to come whole, and for its reply to be taken: milliseconds, unless the other side does neither."""
_HEADERS = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    # Nothing comes from elsewhere, and no script but the page's own file runs.
    "Content-Security-Policy": "default-src 'none'; style-src 'self'; script-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
}


@dataclass(frozen=True, slots=True)
class Reply:
    """The answer to a request.

    Attributes:
        body: Bytes of the content.
        content_type: Its type.
        status: HTTP's.
        headers: More headers than every reply has.
    """

    body: bytes
    content_type: str = "text/html; charset=utf-8"
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)


Route = Callable[[Mapping[str, str]], Reply]
"""Takes the query's parameters and returns the reply; called on a thread of the server."""


class PageServer:
    """Serves routes until it is closed.

    Where it listens at the loopback, it answers only to requests that name the loopback: a page elsewhere on the web
    that has its own name point here gets nothing. At most 32 connections are open; a further one takes the place of the
    one that the server has waited for longest. No request, and no taking of a reply, lasts longer than five seconds.

    Args:
        routes: By path.
        host: Address to listen at.
        port: 0 for any free one.

    Raises:
        Invalid: The address or port cannot be had.
    """

    def __init__(self, routes: Mapping[str, Route], host: str, port: int) -> None:
        try:
            self._server = _Server((host, port), _Handler)
        except OSError as error:
            raise Invalid(
                f"cannot listen at {host}:{port} ({error.strerror or error}): choose another port, or 0 for any"
            ) from None
        self._server.routes = dict(routes)
        self._server.own_names = _LOOPBACK | {host} if _is_loopback(host) else None
        self.host = host
        self.port = int(self._server.server_address[1])
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, name="dstl-page", daemon=True
        )
        self._thread.start()

    @property
    def url(self) -> str:
        """The address of the page."""
        return f"http://{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}/"

    def close(self) -> None:
        """Stop serving. Idempotent."""
        self._server.is_closing = True
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(5)


_LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    # Of Python's five a burst is full, and whoever comes then asks again after a second: a scraper, too.
    request_queue_size = 128
    routes: dict[str, Route]
    own_names: frozenset[str] | None
    is_closing = False

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        self._clock = SystemClock()
        self._lock = threading.Lock()
        self._admitted: set[socket.socket] = set()
        # Connections whose next step is the other side's, and since when: the first has been waited for longest.
        self._awaited: dict[socket.socket, float] = {}
        super().__init__(address, handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Make room for a connection and serve it, or close it where all the others are being answered."""
        with self._lock:
            if len(self._admitted) >= _MOST_CONNECTIONS and self._awaited:
                self._let_go(next(iter(self._awaited)))
            has_room = len(self._admitted) < _MOST_CONNECTIONS
            if has_room:
                self._admitted.add(request)
                self._awaited[request] = self._clock.now()
        if has_room:
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Serve a connection until its end."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            with self._lock:
                self._admitted.discard(request)
                self._awaited.pop(request, None)

    def wait_for(self, request: socket.socket) -> None:
        """Note that the other side must do the next thing, from now on."""
        with self._lock:
            self._awaited.pop(request, None)
            self._awaited[request] = self._clock.now()

    def work_for(self, request: socket.socket) -> None:
        """Note that the next thing is ours."""
        with self._lock:
            self._awaited.pop(request, None)

    def service_actions(self) -> None:
        """Close connections that have been silent for too long; called by the serving thread many times a second."""
        with self._lock:
            late = self._clock.now() - _SILENT_S
            for request in [each for each, since in self._awaited.items() if since < late]:
                self._let_go(request)

    def _let_go(self, request: socket.socket) -> None:
        """End a connection, as its thread notices at once."""
        del self._awaited[request]
        self._admitted.discard(request)
        with suppress(OSError):
            request.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: object, client_address: object) -> None:
        """Say in the log, and nowhere else, that a connection broke."""
        _log.debug("a connection of %s broke", client_address, exc_info=True)


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    server_version = "dstl"
    sys_version = ""
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.server.work_for(self.connection)
        reply = self._reply()
        self.server.wait_for(self.connection)
        self.send_response(reply.status)
        for name, value in {**_HEADERS, **reply.headers, "Content-Type": reply.content_type}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(reply.body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(reply.body)

    do_HEAD = do_GET

    def _reply(self) -> Reply:
        if self.server.is_closing:
            # A connection that was kept open outlives the server's end.
            self.close_connection = True
            return _text("this page has been closed", 503)
        names = self.server.own_names
        try:
            asked, url = urlsplit(f"//{self.headers.get('Host', '')}").hostname, urlsplit(self.path)
        except ValueError:
            return _text("this is not the address of a page", 400)
        if names is not None and asked not in names:
            return _text(f"this page is served to {', '.join(sorted(names))} only", 421)
        route = self.server.routes.get(url.path)
        if route is None:
            return _text(f"there are {', '.join(sorted(self.server.routes))}", 404)
        try:
            return route(dict(parse_qsl(url.query)))
        except (DstlError, TimeoutError) as error:
            return _text(f"{type(error).__name__}: {error}", 503)
        except Exception:
            _log.exception("a request for %s failed", url.path)
            return _text("this request failed: the reason is in the log", 500)

    def log_message(self, format: str, *args: object) -> None:
        """Log requests as debugging: a scraper comes every few seconds."""
        _log.debug(format, *args)


def _text(text: str, status: int) -> Reply:
    return Reply(text.encode(), "text/plain; charset=utf-8", status)
