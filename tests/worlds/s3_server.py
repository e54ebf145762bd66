"""An S3 server in this process (moto's), with faults: for tests and demonstrations without an account."""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from io import BytesIO
from types import TracebackType
from typing import Any, NamedTuple, Self

Environ = dict[str, Any]
StartResponse = Callable[..., Any]
Application = Callable[[Environ, StartResponse], Iterable[bytes]]
_writing = threading.Lock()
"""Of all servers of a process, as moto's buckets are."""


class ServerRequest(NamedTuple):
    """A request as it arrived: method, path with query, and headers by their lower-case names."""

    method: str
    path: str
    headers: Mapping[str, str]


@dataclass(slots=True)
class ServerFault:
    """Something that the server does instead of answering.

    Attributes:
        kind: ``"error"`` answers with ``status`` and ``code`` and does nothing; ``"stored"`` does the work and answers
            so nevertheless; ``"lost"`` does the work and then breaks the connection; ``"reset"`` breaks it without
            doing anything; ``"slow"`` does the work after ``delay_s``; ``"unconditional"`` does the work whatever
            ``If-None-Match`` says, as some servers do; ``"unchecked"`` does it and knows of no checksum, as others do;
            ``"short"`` likewise, and loses the body's last byte.
        method: HTTP method it applies to; empty for all.
        path: Part of the request's path and query; empty for all.
        times: Number of requests that it still applies to.
        status: HTTP status.
        code: S3's error code.
        text: Body of the answer; empty for an error document with ``code``.
        delay_s: Seconds that the request waits first.
    """

    kind: str
    method: str = ""
    path: str = ""
    times: int = 1
    status: int = 503
    code: str = "SlowDown"
    text: str = ""
    delay_s: float = 0.0


class S3Server:
    """moto's S3 on a free port of the loopback interface, each request in a thread of its own.

    It honours conditional puts, ranges, multipart uploads and listings; it checks no signatures, repeats checksums
    unchecked, writes one thing at a time, and needs some CPU: use it for behaviour and not for timing. All servers
    of a process share one set of buckets, so give every test its own bucket. Needs the ``dev`` extra (moto).

    Example::

        with S3Server() as server, server.credentials():
            server.make_bucket("logs")
            store = open_store("s3://logs/job", S3Options(endpoint_url=server.endpoint_url))
    """

    def __init__(self) -> None:
        self.faults: list[ServerFault] = []
        """Applied in order, the first that fits; one with no ``times`` left is skipped."""
        self.latency_s = 0.0
        """Added to every answer."""
        self.requests: Counter[str] = Counter()
        """Requests that arrived, by HTTP method."""
        self.log: list[ServerRequest] = []
        """Every request, in order of arrival."""
        self.fired: list[tuple[str, str, str]] = []
        """Kind, method and path of every fault that was applied."""
        self._lock = threading.Lock()
        self._server: Any = None
        self._thread: threading.Thread | None = None

    @property
    def endpoint_url(self) -> str:
        """``http://127.0.0.1:port``."""
        return f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> Self:
        from moto.server import DomainDispatcherApplication, create_backend_app
        from werkzeug.serving import make_server

        logging.getLogger("werkzeug").setLevel(logging.ERROR)
        application: Application = DomainDispatcherApplication(create_backend_app)
        self._server = make_server("127.0.0.1", 0, self._faulty(application), threaded=True)
        # Connections are kept open by clients: their threads must not hold up the end.
        self._server.daemon_threads = True
        self._server.block_on_close = False
        self._thread = threading.Thread(target=self._server.serve_forever, name="s3-server", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
        assert self._thread is not None
        self._thread.join(10)

    @contextmanager
    def credentials(self) -> Iterator[Mapping[str, str]]:
        """Put made-up credentials into this process's environment, and the old ones back at the end."""
        ours = {
            "AWS_ACCESS_KEY_ID": "testing",
            "AWS_SECRET_ACCESS_KEY": "testing",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
        }
        gone = ("AWS_PROFILE", "AWS_SESSION_TOKEN", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3")
        before = {name: os.environ.get(name) for name in (*ours, *gone)}
        os.environ.update(ours)
        for name in gone:
            os.environ.pop(name, None)
        try:
            yield ours
        finally:
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value

    def make_bucket(self, name: str) -> None:
        """Make a bucket."""
        from http.client import HTTPConnection

        connection = HTTPConnection("127.0.0.1", self._server.server_port, timeout=10)
        try:
            connection.request("PUT", f"/{name}")
            answer = connection.getresponse()
            if answer.status != 200:
                raise RuntimeError(f"bucket {name} was not made: {answer.status} {answer.read()[:200]!r}")
            answer.read()
        finally:
            connection.close()

    def fail(self, kind: str, **settings: Any) -> ServerFault:
        """Add a fault; the arguments are :class:`ServerFault`'s."""
        fault = ServerFault(kind, **settings)
        self.faults.append(fault)
        return fault

    def _faulty(self, application: Application) -> Application:
        def serve(environ: Environ, start: StartResponse) -> Iterable[bytes]:
            method = environ["REQUEST_METHOD"]
            query = environ.get("QUERY_STRING", "")
            path = environ.get("PATH_INFO", "") + (f"?{query}" if query else "")
            with self._lock:
                self.requests[method] += 1
                self.log.append(ServerRequest(method, path, _headers(environ)))
                fault = self._next_fault(method, path)
            delay_s = self.latency_s + (fault.delay_s if fault is not None else 0.0)
            if delay_s:
                time.sleep(delay_s)
            if fault is not None and fault.kind in ("unconditional", "unchecked", "short", "slow"):
                if fault.kind == "unconditional":
                    environ.pop("HTTP_IF_NONE_MATCH", None)
                elif fault.kind != "slow":
                    environ.pop("HTTP_X_AMZ_CHECKSUM_CRC32C", None)
                if fault.kind == "short":
                    environ["CONTENT_LENGTH"] = str(int(environ["CONTENT_LENGTH"]) - 1)
                fault = None
            # The body is read in any case: a client that is still sending would see the wrong failure.
            environ["wsgi.input"] = BytesIO(environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0)))
            # moto looks and then writes, without a lock: of two puts at once, both would find a name free.
            with _writing if method not in ("GET", "HEAD") else nullcontext():
                if fault is None:
                    return application(environ, _repeating(environ.get("HTTP_X_AMZ_CHECKSUM_CRC32C"), start))
                if fault.kind in ("lost", "stored"):
                    for _ in application(environ, lambda *_: lambda _: None):
                        pass
            return _error(fault, start) if fault.kind in ("error", "stored") else _broken(environ)

        return serve

    def _next_fault(self, method: str, path: str) -> ServerFault | None:
        for fault in self.faults:
            if fault.times > 0 and fault.method in ("", method) and fault.path in path:
                fault.times -= 1
                self.fired.append((fault.kind, method, path))
                return fault
        return None


def _headers(environ: Environ) -> dict[str, str]:
    return {key[5:].lower().replace("_", "-"): value for key, value in environ.items() if key.startswith("HTTP_")}


def _repeating(checksum: str | None, start: StartResponse) -> StartResponse:
    """Return what begins an answer that tells the request's checksum, as S3's does."""

    def begin(status: str, headers: list[tuple[str, str]], *more: Any) -> Any:
        told = [("x-amz-checksum-crc32c", checksum)] if checksum is not None and status.startswith("200") else []
        return start(status, [*headers, *told], *more)

    return begin


def _error(fault: ServerFault, start: StartResponse) -> Iterable[bytes]:
    text = (fault.text or f"<Error><Code>{fault.code}</Code><Message>made up</Message></Error>").encode()
    start(f"{fault.status} Made Up", [("Content-Type", "text/xml"), ("Content-Length", str(len(text)))])
    return [text]


def _broken(environ: Environ) -> Iterable[bytes]:
    connection: socket.socket = environ["werkzeug.socket"]
    connection.shutdown(socket.SHUT_RDWR)
    raise ConnectionResetError("the connection is broken on purpose")
