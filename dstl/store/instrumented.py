"""A store that counts its calls, and records what each has taken."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from dstl.metrics import NullRecorder, Recorder
from dstl.runtime import Clock, SystemClock
from dstl.store.base import ByteRange, ObjectInfo, ObjectStore


@dataclass(frozen=True, slots=True)
class CallMetrics:
    """The names under which a store's calls are recorded: a TaskManager's by default."""

    requests: str = "storeRequests"
    nanos: str = "storeRequestNanos"
    bytes: str = "storeRequestBytes"
    failures: str = "storeRequestFailures"


class InstrumentedStore:
    """Counts what goes through it and passes everything on unchanged.

    The difference of :attr:`calls` before and after a checkpoint is that checkpoint's requests. S3 needs more requests
    than calls for objects in parts.

    Args:
        inner: Closed together with this one.
        recorder: Also receives each call.
        clock: For the durations.
        names: What it receives: counters of requests and failures, cancelled ones included; distributions of their
            nanoseconds, and of the bytes stored or read, or the number of names listed or deleted. Each has the verb as
            its label.

    Attributes:
        calls: Those of each verb, successful or not. A list is one call, however many pages the store needs.
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
        self.calls: Counter[str] = Counter()

    @property
    def location(self) -> str:
        """The inner store's."""
        return self.inner.location

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
        call, started, has_failed = _Call(), self._clock.now(), False
        # At once: a list that is left early ends when the collector gets to it.
        self.calls[verb] += 1
        try:
            yield call
        except GeneratorExit:
            raise
        except BaseException:
            has_failed = True
            raise
        finally:
            self._record(verb, call.bytes, self._clock.now() - started, has_failed)

    def _record(self, verb: str, size: int, seconds: float, has_failed: bool) -> None:
        names = self._names
        self._recorder.increment(f"{names.requests}.{verb}")
        self._recorder.observe(f"{names.nanos}.{verb}", seconds * 1e9)
        if has_failed:
            self._recorder.increment(f"{names.failures}.{verb}")
        else:
            self._recorder.observe(f"{names.bytes}.{verb}", size)


class _Call:
    __slots__ = ("bytes",)

    def __init__(self) -> None:
        self.bytes = 0
