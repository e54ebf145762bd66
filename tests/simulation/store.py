"""An object store in virtual time: atomic, strongly consistent where S3 is, and faulty where S3 is.

A request has two moments: when the store applies it and when the caller hears of it. Faults put them apart: an answer
is lost, a PUT is applied a minute after its caller was cancelled or killed. The auditor sees every request when it is
sent, applied or certainly dropped.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextvars import copy_context
from typing import Any, NamedTuple, Protocol, TypeVar, cast

from dstl.errors import DstlError, ObjectExists, ObjectNotFound, OutcomeUnknown, Unavailable
from dstl.store.base import ByteRange, ObjectInfo, check_name
from dstl.store.s3 import MultipartUploader
from dstl.store.s3_client import S3Client
from tests.simulation.faults import FaultKind, FaultPlan
from tests.simulation.faulty_store import Applied, Change, Fault, as_before, by_directory, course_of
from tests.simulation.process import Process, ProcessLoop

T = TypeVar("T")

_MOST_PARTS = 4
_READ_TIMEOUT_S = 30.0  # as S3Options.read_timeout_s: no client waits for ever
_ALWAYS = (FaultKind.SLOW_DOWN, FaultKind.UNAVAILABLE, FaultKind.RESET, FaultKind.SLOW, FaultKind.STUCK)
_POSSIBLE = {
    "put": (*_ALWAYS, FaultKind.LOST_RESPONSE, FaultKind.LATE_PUT, FaultKind.STORED_SLOW_DOWN),
    "get": (*_ALWAYS, FaultKind.SHORT_GET),
    "head": _ALWAYS,
    "list": (*_ALWAYS, FaultKind.STALE_LIST),
    "delete": (*_ALWAYS, FaultKind.LOST_RESPONSE, FaultKind.PARTIAL_DELETE),
}


class Stored(NamedTuple):
    """An object: its bytes and when it was created, by the store's clock."""

    body: bytes
    modified: float


class Audit(Protocol):
    """Hears of everything that happens to stored objects."""

    def sent(self, request: int, name: str, body: bytes) -> None:
        """A PUT is on its way and may be applied at any time from now on."""
        ...

    def landed(self, request: int, name: str, body: bytes) -> None:
        """A PUT was applied: the object is visible."""
        ...

    def dropped(self, request: int) -> None:
        """A PUT will certainly never be applied."""
        ...

    def deleting(self, name: str) -> None:
        """An object that is there is about to be deleted."""
        ...


class SimulatedStore:
    """The objects, and the faults on the way to them.

    Args:
        loop: The world's.
        rng: Latencies and faults.
        plan: The faults.
        audit: Told of everything.
        count: Told the kind of each fault that happened.
        trace: Takes a line for each change.
        objects: Holds the objects, by name.

    Attributes:
        slow_bases_s: A base takes up to so many seconds more to come, as a large one does.
        part_size: Larger objects are uploaded in parts of so many bytes.
        damaged: Those of which a bit is wrong, as they were.
        uploads: The parts of those that are neither complete nor aborted.
    """

    def __init__(
        self,
        loop: ProcessLoop,
        rng: random.Random,
        plan: FaultPlan,
        audit: Audit,
        count: Callable[[FaultKind], None],
        trace: Callable[[str, str], None],
        *,
        objects: dict[str, Stored],
    ) -> None:
        self.loop = loop
        self.plan = plan
        self.objects = objects
        self.in_flight: dict[int, str] = {}
        self.outage_until = self.full_until = 0.0
        self.closed = False
        self._rng = rng
        self._audit = audit
        self.count = count
        self.trace = trace
        self._requests = 0
        self._history: list[Change] = []
        self._median = rng.choice((0.005, 0.02, 0.06))
        self.slow_bases_s = 0.0
        self.part_size = math.inf
        self.uploads: dict[str, dict[int, bytes]] = {}
        self.damaged: Mapping[str, Stored] = {}
        self.context = copy_context()

    @property
    def requests(self) -> int:
        """Number of the requests so far."""
        return self._requests

    def client(self, process: Process, location: str = "sim://") -> ClientStore:
        """Return the store as one process reaches it."""
        return ClientStore(self, process, location)

    def put(self, name: str, body: bytes, if_absent: bool) -> ObjectInfo:
        """Apply a PUT."""
        there = self.objects.get(name)
        if there is not None and if_absent:
            raise ObjectExists(f"sim://{name} exists already")
        stored = self.objects[name] = Stored(body, self.loop.time())
        info = ObjectInfo(name, len(body), stored.modified)
        self._history.append((stored.modified, info, True))
        self.trace("put", name)
        return info

    def find(self, name: str) -> Stored:
        """Return an object.

        Raises:
            ObjectNotFound: There is not one of that name.
        """
        there = self.objects.get(name)
        if there is None:
            raise ObjectNotFound(f"no object sim://{name}")
        return there

    def delete(self, names: Sequence[str]) -> None:
        """Apply a DELETE of several names."""
        for name in names:
            if name in self.objects:
                self._audit.deleting(name)
                gone = self.objects.pop(name)
                self._history.append((self.loop.time(), ObjectInfo(name, len(gone.body), gone.modified), False))
                self.trace("delete", name)

    def listing(self, prefix: str, age: float = 0.0) -> list[ObjectInfo]:
        """Return what a LIST shows that is so many seconds stale."""
        now = [ObjectInfo(n, len(s.body), s.modified) for n, s in self.objects.items() if n.startswith(prefix)]
        known = as_before(now, reversed(self._history if age else ()), self.loop.time() - age, prefix)
        if self.plan.by_directory and (other := by_directory(known)) != known:
            self.count(FaultKind.OTHER_ORDER)
            return other
        return known

    def next_request(self) -> int:
        """Return a number for a request."""
        self._requests += 1
        return self._requests

    def latency(self, verb: str, name: str) -> float:
        """Seconds from request to answer: around the median, with a tail; for a base long at times, until all heals."""
        seconds = self._median * min(8.0, self._rng.lognormvariate(0.0, 0.5))
        if self.slow_bases_s and not self.plan.healed and verb == "get" and name.endswith(".base"):
            seconds += self._rng.choice((0.0, 0.0, self.slow_bases_s)) * self._rng.random()
        return seconds

    def fault(self, verb: str, name: str) -> FaultKind | None:
        """Draw what happens to a request."""
        if self.loop.time() < self.outage_until and not self.plan.healed:
            self.count(FaultKind.OUTAGE)
            return FaultKind.UNAVAILABLE if self._rng.random() < 0.7 else FaultKind.STUCK
        if verb == "put" and self.loop.time() < self.full_until and not self.plan.healed:
            self.count(FaultKind.FULL)
            return FaultKind.FULL
        kind = self.plan.request_fault(self._rng, _POSSIBLE[verb], name)
        if kind is not None:
            self.count(kind)
        return kind

    def delay(self) -> float:
        """Seconds by which something comes late."""
        return self._rng.uniform(0.05, self.plan.longest_delay_s) * self._rng.random()

    def chance(self, probability: float) -> bool:
        """Draw a yes or no."""
        return self._rng.random() < probability

    def part(self, size: int) -> int:
        """Draw a number in ``[0, size)``."""
        return self._rng.randrange(size)

    def audit_put(self, request: int, name: str, body: bytes) -> None:
        """Note that a PUT is on its way."""
        self.in_flight[request] = name
        self._audit.sent(request, name, body)

    def apply_put(self, request: int, name: str, body: bytes, if_absent: bool) -> ObjectInfo:
        """Apply a PUT that was on its way."""
        del self.in_flight[request]
        try:
            info = self.put(name, body, if_absent)
        except ObjectExists:
            self._audit.dropped(request)
            raise
        self._audit.landed(request, name, body)
        return info

    def add_part(self, upload: str, number: int, body: bytes) -> None:
        """Take a part of an upload.

        Raises:
            Unavailable: It is complete, or was aborted.
        """
        if upload not in self.uploads:
            raise Unavailable(f"NoSuchUpload {upload}")
        self.uploads[upload][number] = body

    def complete(self, request: int, name: str, upload: str) -> ObjectInfo:
        """Make an object of an upload's parts.

        Raises:
            Unavailable: It was aborted.
        """
        parts = self.uploads.pop(upload, None)
        if parts is None:
            self.drop_put(request)
            raise Unavailable(f"NoSuchUpload {upload}")
        return self.apply_put(request, name, b"".join(body for _, body in sorted(parts.items())), if_absent=False)

    def drop_put(self, request: int) -> None:
        """Forget a PUT that will never be applied."""
        if self.in_flight.pop(request, None) is not None:
            self._audit.dropped(request)


class _Request:
    """One request on its way: applied at one time, answered at another, perhaps abandoned in between."""

    def __init__(self, store: SimulatedStore, process: Process, survives: bool) -> None:
        self._store = store
        self._process = process
        self._survives = survives
        self.answer: asyncio.Future[Any] = store.loop.create_future()
        self.apply: Callable[[], Any] | None = None
        self.drop: Callable[[], None] | None = None
        self._abandoned = False

    def apply_at(self, when: float, *, reply_at: float | None) -> None:
        self._store.loop.call_at(when, self._apply, reply_at, context=self._store.context)

    def reply_at(self, when: float, error: Exception) -> None:
        self._store.loop.call_at(when, self._reply, None, error, context=self._store.context)

    def abandon(self) -> None:
        """The caller no longer listens; what was sent may arrive nevertheless, a good while later."""
        self._abandoned = True

    def _apply(self, reply_at: float | None) -> None:
        apply, self.apply = self.apply, None
        if apply is None:
            return
        gone = self._abandoned or self._process.is_dead
        if gone and not self._survives:
            if self.drop is not None:
                self.drop()
            return
        if self._abandoned and self.drop is not None and not self._process.is_dead:
            self._abandoned = False
            self.apply = apply
            self._store.count(FaultKind.LATE_AFTER_CANCEL)
            self.apply_at(self._store.loop.time() + self._store.delay(), reply_at=None)
            return
        if self._process.is_dead and self.drop is not None:
            self._store.count(FaultKind.LATE_AFTER_DEATH)
        try:
            result, error = apply(), None
        except Exception as raised:
            result, error = None, raised
        if reply_at is not None:
            self._store.loop.call_at(reply_at, self._reply, result, error, context=self._store.context)

    def _reply(self, result: Any, error: Exception | None) -> None:
        if not self.answer.done():
            if error is not None:
                self.answer.set_exception(error)
                self.answer.exception()
            else:
                self.answer.set_result(result)


class ClientStore:
    """The store as one simulated process sees it: an ``ObjectStore``."""

    def __init__(self, store: SimulatedStore, process: Process, location: str) -> None:
        self._store = store
        self._process = process
        self._uploaders: list[MultipartUploader] = []
        self.location = location

    async def put(self, name: str, data: bytes | memoryview, *, if_absent: bool = False) -> ObjectInfo:
        """Store an object; see :meth:`ObjectStore.put <dstl.store.base.ObjectStore.put>`."""
        body, store = bytes(data), self._store
        if len(body) > store.part_size and not if_absent:
            # As S3Store does; of so few parts that an attempt has the time for all of them.
            size = max(int(store.part_size), -(-len(body) // _MOST_PARTS))
            uploader = MultipartUploader(cast(S3Client, self), part_size=size, concurrency=2)
            self._uploaders.append(uploader)
            await uploader.upload({"Key": check_name(name)}, memoryview(body), what=name, creating={})
            try:
                stored = await self.head(name)
            except DstlError as error:
                raise OutcomeUnknown(f"{name} could not be confirmed: {error}") from error
            return stored
        number = store.next_request()
        store.audit_put(number, check_name(name), body)
        info: ObjectInfo = await self._call(
            "put", name, lambda: store.apply_put(number, name, body, if_absent), lambda: store.drop_put(number)
        )
        return info

    async def get(self, name: str, byte_range: ByteRange | None = None) -> bytes:
        """Return an object's bytes, or a range of them."""

        def read() -> bytes:
            body = self._store.find(name).body
            if name in self._store.damaged:
                is_segment = name.endswith(".seg")
                self._store.count(FaultKind.DAMAGED_SEGMENT if is_segment else FaultKind.DAMAGED_BASE)
            return body if byte_range is None else body[byte_range.start : byte_range.stop]

        return await self._call("get", check_name(name), read)

    async def head(self, name: str) -> ObjectInfo:
        """Return size and age of an object."""

        def read() -> ObjectInfo:
            found = self._store.find(name)
            return ObjectInfo(name, len(found.body), found.modified)

        return await self._call("head", check_name(name), read)

    async def list(self, prefix: str = "") -> AsyncGenerator[ObjectInfo, None]:
        """Yield objects in name order; a stale list as they were."""
        for info in await self._call("list", prefix, lambda: self._store.listing(prefix)):
            yield info

    async def delete(self, names: Sequence[str]) -> None:
        """Delete objects; a name that is already gone is a success."""
        doomed = [check_name(name) for name in names]
        if doomed:
            await self._call("delete", ",".join(doomed), lambda: self._store.delete(doomed))

    async def close(self) -> None:
        """Wait for what is being aborted."""
        for each in self._uploaders:
            await each.close()

    async def call(self, operation: str, *, Key: str, UploadId: str = "", **given: Any) -> dict[str, Any]:
        """Make one request of an upload in parts; an ``S3Client`` as its uploader sees it."""
        store, number = self._store, self._store.next_request()
        match operation:
            case "create_multipart_upload":
                upload = f"{Key} {number}"
                await self._call("head", Key, lambda: store.uploads.setdefault(upload, {}))
                return {"UploadId": upload}
            case "upload_part":
                part = given["PartNumber"]
                await self._call("head", Key, lambda: store.add_part(UploadId, part, given["Body"]))
                return {"ETag": f"{part}"}
            case "complete_multipart_upload":
                parts = sorted(store.uploads.get(UploadId, {}).items())
                assert [part for part, _ in parts] == [each["PartNumber"] for each in given["MultipartUpload"]["Parts"]]
                body = b"".join(part for _, part in parts)
                store.audit_put(number, Key, body)
                await self._call(
                    "put", Key, lambda: store.complete(number, Key, UploadId), lambda: store.drop_put(number)
                )
            case "abort_multipart_upload":
                await self._call("delete", Key, lambda: store.uploads.pop(UploadId, None))
        return {}

    async def _call(self, verb: str, name: str, apply: Callable[[], T], drop: Callable[[], None] | None = None) -> T:
        store = self._store
        if store.closed:
            raise Unavailable("the world has ended")
        now, latency, kind = store.loop.time(), store.latency(verb, name), store.fault(verb, name)
        request = _Request(store, self._process, store.chance(store.plan.survives_cancel))
        request.apply, request.drop = apply, drop
        reply = now + latency + (store.delay() if kind is FaultKind.SLOW else 0.0)
        fault = Fault(kind.removeprefix("store-")) if kind is not None else None
        applied, told = course_of(fault, verb, f"sim://{name}")
        at = now + 0.6 * (reply - now)
        match kind:
            case FaultKind.STALE_LIST:
                age = store.delay()
                request.apply = lambda: store.listing(name, age)
            case FaultKind.PARTIAL_DELETE:
                some = name.split(",")
                request.apply = lambda: store.delete(some[: store.part(len(some) + 1)])
            case FaultKind.SHORT_GET:
                request.apply = lambda: _cut(apply(), store)
            case FaultKind.STORED_SLOW_DOWN:
                # The server behind the gateway restarts, and is not reached until it is back.
                store.outage_until = max(store.outage_until, reply + store.delay())
            case FaultKind.LATE_PUT:
                at = reply + store.delay()
            case FaultKind.STUCK:
                reply, applied = now + _READ_TIMEOUT_S, Applied.LATER if store.chance(0.5) else Applied.NEVER
                at = now + store.delay()
        if told is not None:
            request.reply_at(reply, told)
        if applied is not Applied.NEVER:
            request.apply_at(at, reply_at=reply if told is None else None)
        elif drop is not None:
            drop()
        try:
            result: T = await request.answer
        except asyncio.CancelledError:
            request.abandon()
            raise
        return result


def _cut(body: Any, store: SimulatedStore) -> Any:
    return body[: store.part(len(body))] if body else body
