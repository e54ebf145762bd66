"""A store that counts: calls, bytes and seconds by verb."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields

from dstl.metrics import NullRecorder, Recorder
from dstl.runtime import Clock, SystemClock
from dstl.store.base import ByteRange, ObjectInfo, ObjectStore


@dataclass(frozen=True, slots=True)
class VerbTotals:
    """The counts of one verb so far.

    Attributes:
        calls: Calls, successful or not. A list is one call, however many pages the store needs.
        errors: Calls that raised, cancelled ones included.
        bytes: Bytes stored or read; for a list the number of objects, for a delete the number of names.
        seconds: Sum of the calls' durations; calls that overlap count each.
    """

    calls: int = 0
    errors: int = 0
    bytes: int = 0
    seconds: float = 0.0

    def __sub__(self, earlier: VerbTotals) -> VerbTotals:
        return VerbTotals(*(getattr(self, one.name) - getattr(earlier, one.name) for one in fields(self)))


@dataclass(frozen=True, slots=True)
class StoreTotals:
    """The counts of a store so far, by verb; the difference of two is what happened in between."""

    put: VerbTotals = VerbTotals()
    get: VerbTotals = VerbTotals()
    head: VerbTotals = VerbTotals()
    list: VerbTotals = VerbTotals()
    delete: VerbTotals = VerbTotals()

    @property
    def calls(self) -> int:
        """Calls of all verbs."""
        return sum(getattr(self, one.name).calls for one in fields(self))

    def __sub__(self, earlier: StoreTotals) -> StoreTotals:
        return StoreTotals(*(getattr(self, one.name) - getattr(earlier, one.name) for one in fields(self)))


@dataclass(frozen=True, slots=True)
class CallMetrics:
    """The names under which a store's calls are recorded: a TaskManager's by default."""

    requests: str = "storeRequests"
    nanos: str = "storeRequestNanos"
    bytes: str = "storeRequestBytes"
    failures: str = "storeRequestFailures"


class InstrumentedStore:
    """Counts what goes through it and passes everything on unchanged.

    The difference of :attr:`totals` before and after a checkpoint is that checkpoint's requests. S3 needs more requests
    than calls for objects in parts; ``S3Store.requests`` has those.

    Args:
        inner: Closed together with this one.
        recorder: Also receives each call.
        clock: For the durations.
        names: What it receives: counters of requests and failures, distributions of their nanoseconds and bytes, each
            with the verb as its label.
    """

    def __init__(
        self,
        inner: ObjectStore,
        *,
        recorder: Recorder | None = None,
        clock: Clock | None = None,
        names: CallMetrics = CallMetrics(),
    ) -> None:
        self.inner = inner
        self._recorder: Recorder = recorder or NullRecorder()
        self._clock: Clock = clock or SystemClock()
        self._names = names
        # As VerbTotals has them, but counted in place: this is done for each request.
        self._counts = {each.name: [0, 0, 0, 0.0] for each in fields(StoreTotals)}

    @property
    def location(self) -> str:
        """The inner store's."""
        return self.inner.location

    @property
    def totals(self) -> StoreTotals:
        """Everything so far; a value that does not change any more."""
        return StoreTotals(**{verb: VerbTotals(*counts) for verb, counts in self._counts.items()})  # type: ignore[arg-type]

    async def put(self, name: str, data: bytes | memoryview, *, if_absent: bool = False) -> ObjectInfo:
        """Store an object; see :meth:`ObjectStore.put <dstl.store.base.ObjectStore.put>`."""
        with self._measure("put") as done:
            info = await self.inner.put(name, data, if_absent=if_absent)
            done.bytes = info.size
        return info

    async def get(self, name: str, byte_range: ByteRange | None = None) -> bytes:
        """Return an object's bytes, or a range of them."""
        with self._measure("get") as done:
            body = await self.inner.get(name, byte_range)
            done.bytes = len(body)
        return body

    async def head(self, name: str) -> ObjectInfo:
        """Return size and age of an object."""
        with self._measure("head"):
            return await self.inner.head(name)

    async def list(self, prefix: str = "") -> AsyncGenerator[ObjectInfo, None]:
        """Yield objects. The seconds include the caller's between two objects."""
        with self._measure("list") as done:
            async for info in self.inner.list(prefix):
                done.bytes += 1
                yield info

    async def delete(self, names: Sequence[str]) -> None:
        """Delete objects; a name that is already gone is a success."""
        with self._measure("delete") as done:
            await self.inner.delete(names)
            done.bytes = len(names)

    async def close(self) -> None:
        """Close the inner store. Idempotent."""
        await self.inner.close()

    @contextmanager
    def _measure(self, verb: str) -> Iterator[_Call]:
        call, started, errors = _Call(), self._clock.now(), 0
        counts = self._counts[verb]
        # At once: a list that is left early ends when the collector gets to it.
        counts[0] += 1
        try:
            yield call
        except GeneratorExit:
            raise
        except BaseException:
            errors = 1
            raise
        finally:
            seconds = self._clock.now() - started
            counts[1:] = counts[1] + errors, counts[2] + call.bytes, counts[3] + seconds
            self._record(verb, call.bytes, seconds, errors)

    def _record(self, verb: str, size: int, seconds: float, errors: int) -> None:
        names = self._names
        self._recorder.increment(f"{names.requests}.{verb}")
        self._recorder.observe(f"{names.nanos}.{verb}", seconds * 1e9)
        if errors:
            self._recorder.increment(f"{names.failures}.{verb}")
        else:
            self._recorder.observe(f"{names.bytes}.{verb}", size)


class _Call:
    __slots__ = ("bytes",)

    def __init__(self) -> None:
        self.bytes = 0
