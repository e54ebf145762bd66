"""A connection to S3: made on first use in each loop, never retrying, closed in order."""

from __future__ import annotations

import asyncio
import io
import os
from collections.abc import AsyncIterator, Generator
from contextlib import AsyncExitStack
from functools import cache
from importlib import import_module
from types import coroutine
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from dstl.errors import Closed, Invalid
from dstl.options import S3Options
from dstl.store.s3_errors import is_expired

_SLICE = 256 << 10  # as long as the socket takes everything, other uploads have their turn after so many bytes


class S3Client:
    """Calls operations of S3 by their name, each exactly once.

    Invariants:
        1. One request for one call: botocore's retries are off, and so is the one that aiohttp makes on its own when a
           connection breaks (a repeated conditional PUT would meet its own object).
        2. Exception: credentials that S3 calls expired are read anew, once; such a request was certainly not done.
        3. A body leaves in slices of 256 KB, so the loop turns in between.

    One client per event loop. Refuses to work after a fork: TLS connections cannot be shared.

    Args:
        options: Everything but credentials, which the SDK's provider chain finds.
    """

    def __init__(self, options: S3Options) -> None:
        self._options = options
        self._pid = os.getpid()
        self._closed = False
        self._opened: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Task[_Opened]] = WeakKeyDictionary()
        self._retired: list[asyncio.Task[_Opened]] = []

    async def call(self, operation: str, **parameters: Any) -> dict[str, Any]:
        """Send one request and return the SDK's answer.

        Raises:
            Closed: After ``close``, or in a forked child.
            Exception: The SDK's own errors, see :func:`dstl.store.s3_errors.sdk_errors`.
        """
        if self._options.expected_bucket_owner is not None:
            parameters["ExpectedBucketOwner"] = self._options.expected_bucket_owner
        opening = self._opening()
        try:
            return await self._send(opening, operation, parameters)
        except Exception as error:
            if not is_expired(error):
                raise
        self._retire(opening)
        return await self._send(self._opening(), operation, parameters)

    async def close(self) -> None:
        """Close this loop's connections. Idempotent."""
        self._closed = True
        loop = asyncio.get_running_loop()
        opening = self._opened.pop(loop, None)
        mine = [one for one in (*self._retired, opening) if one is not None and one.get_loop() is loop]
        self._retired.clear()
        for one in mine:
            one.cancel()
        for opened in await asyncio.gather(*mine, return_exceptions=True):
            if isinstance(opened, _Opened):
                await opened.stack.aclose()

    async def _send(self, opening: asyncio.Task[_Opened], operation: str, parameters: dict[str, Any]) -> dict[str, Any]:
        # Shielded: one caller that gives up does not take the client from the others.
        opened = await asyncio.shield(opening)
        answer: dict[str, Any] = await getattr(opened.client, operation)(**parameters)
        return answer

    def _opening(self) -> asyncio.Task[_Opened]:
        if os.getpid() != self._pid:
            raise Closed("an S3 store does not survive a fork: open a new one in the child")
        if self._closed:
            raise Closed("this S3 store was closed: open a new one")
        loop = asyncio.get_running_loop()
        opening = self._opened.get(loop)
        if opening is None or (opening.done() and (opening.cancelled() or opening.exception() is not None)):
            opening = self._opened[loop] = loop.create_task(_open(self._options), name="dstl-s3-open")
        return opening

    def _retire(self, opening: asyncio.Task[_Opened]) -> None:
        # Many requests learn of the same expiry: only the first replaces the client. The old one is closed at the
        # end, because others may still be reading from it.
        loop = asyncio.get_running_loop()
        if self._opened.get(loop) is opening:
            del self._opened[loop]
            self._retired.append(opening)


class _Opened(NamedTuple):
    client: Any
    stack: AsyncExitStack


async def _open(options: S3Options) -> _Opened:
    try:
        # Not on the loop: the import takes about a second.
        models = await asyncio.to_thread(_models)
    except ImportError as error:
        raise Invalid("S3 needs an extra: pip install 'dstl-pyspark[s3]'") from error
    stack = AsyncExitStack()
    client = await stack.enter_async_context(_make_client(models, options, options.endpoint_url))
    endpoint = client.meta.endpoint_url
    if options.endpoint_url is None and endpoint.startswith("http:"):
        # The SDK's own configuration names another server, without TLS: bodies must be signed.
        await stack.aclose()
        client = await stack.enter_async_context(_make_client(models, options, endpoint))
    return _Opened(client, stack)


@cache
def _models() -> Any:
    """Import the SDK and read its description of S3, once for all clients of the process."""
    import_module("aiobotocore.session")
    from botocore.loaders import Loader

    loader = Loader()
    for model in ("service-2", "endpoint-rule-set-1"):
        loader.load_service_model("s3", model)
    return loader


def _make_client(models: Any, options: S3Options, endpoint_url: str | None) -> Any:
    from aiobotocore.config import AioConfig
    from aiobotocore.session import AioSession

    style = options.addressing_style or ("virtual" if endpoint_url is None else "path")
    s3: dict[str, Any] = {"addressing_style": style}
    if endpoint_url is None or endpoint_url.startswith("https:"):
        # TLS and our checksum protect the body. SHA-256 over it as well would hold the loop for 3-15 ms per 5 MB.
        s3["payload_signing_enabled"] = False
    config = AioConfig(
        retries={"total_max_attempts": 1, "mode": "standard"},
        connect_timeout=options.connect_timeout_s,
        read_timeout=options.read_timeout_s,
        max_pool_connections=options.max_connections,
        # Ours is CRC-32C (29 GB/s); the SDK's own CRC-32 would take the aws-chunked path in Python.
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
        tcp_keepalive=True,
        s3=s3,
        http_session_cls=_one_shot_session(),
    )
    # A new session reads the provider chain anew.
    session = AioSession()
    session.register_component("data_loader", models)
    wanted: dict[str, Any] = {"region_name": options.region, "endpoint_url": endpoint_url, "config": config}
    try:
        import aioboto3
    except ImportError:
        # The extra s3-aiobotocore: aioboto3 pins one boto3, and is a shell around this session.
        return session.create_client("s3", **wanted)
    return aioboto3.Session(botocore_session=session).client("s3", **wanted)


@coroutine
def _one_turn() -> Generator[None, None, None]:
    yield


class _Slices:
    """A body that can be sent once: a second reading fails instead of repeating a PUT behind our back."""

    def __init__(self, body: memoryview) -> None:
        self._body = body
        self._sent = False

    async def __aiter__(self) -> AsyncIterator[memoryview]:
        if self._sent:
            raise ConnectionResetError("the connection broke while the request was under way")
        self._sent = True
        for at in range(0, len(self._body), _SLICE):
            yield self._body[at : at + _SLICE]
            # As long as the socket takes everything, nothing else in here lets the loop turn.
            await _one_turn()


@cache
def _one_shot_session() -> type[Any]:
    from aiobotocore.httpsession import AIOHTTPSession

    class OneShotSession(AIOHTTPSession):
        """Sends every body as slices, only once, and without asking first."""

        async def send(self, request: Any) -> Any:
            # botocore has made a file of the bytes, which aiohttp would read piece by piece in another thread;
            # getvalue gives the same bytes again, without a copy.
            if isinstance(request.body, io.BytesIO):
                request.body = _Slices(memoryview(request.body.getvalue()))
            elif isinstance(request.body, bytes | bytearray):
                request.body = _Slices(memoryview(request.body))
            # Waiting for "100 Continue" is a round trip for every PUT. It is not among the signed headers.
            if "Expect" in request.headers:
                del request.headers["Expect"]
            return await super().send(request)

    return OneShotSession
