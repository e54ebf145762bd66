"""A small HTTP server for metrics and the page: GET only, on a thread of its own, by the standard library."""

from __future__ import annotations

import ipaddress
import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qsl, urlsplit

from dstl.errors import DstlError, Invalid

__all__ = ["PageServer", "Reply", "Route"]

_log = logging.getLogger(__name__)
_IDLE_S = 30
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
    that has its own name point here gets nothing.

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
        self._server.own_names = _LOOPBACK if _is_loopback(host) else None
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
    routes: dict[str, Route]
    own_names: frozenset[str] | None
    is_closing = False

    def handle_error(self, request: object, client_address: object) -> None:
        """Say in the log, and nowhere else, that a connection broke."""
        _log.debug("a connection of %s broke", client_address, exc_info=True)


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    server_version = "dstl"
    sys_version = ""
    protocol_version = "HTTP/1.1"
    timeout = _IDLE_S

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def _answer(self, *, with_body: bool) -> None:
        reply = self._reply()
        self.send_response(reply.status)
        for name, value in {**_HEADERS, **reply.headers, "Content-Type": reply.content_type}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(reply.body)))
        self.end_headers()
        if with_body:
            self.wfile.write(reply.body)

    def _reply(self) -> Reply:
        if self.server.is_closing:
            # A connection that was kept open outlives the server's end.
            self.close_connection = True
            return _text("this page has been closed", 503)
        names = self.server.own_names
        asked = urlsplit(f"//{self.headers.get('Host', '')}").hostname
        if names is not None and asked not in names:
            return _text(f"this page is served to {', '.join(sorted(names))} only", 421)
        url = urlsplit(self.path)
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
