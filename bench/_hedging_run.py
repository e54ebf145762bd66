"""One arm of the hedging benchmark: a workload through real uploaders over the latency model, in virtual time."""

from __future__ import annotations

import asyncio
import gc
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field

import google_crc32c
import numpy as np
from numpy.typing import NDArray

from dstl.changelog.upload.hedging import HedgePolicy
from dstl.changelog.upload.uploader import StoredObject, Uploader
from dstl.errors import ObjectNotFound
from dstl.metrics import NullRecorder
from dstl.options import HedgingOptions, UploadOptions
from dstl.store.base import ByteRange, ObjectInfo
from tests.simulation.latency import LatencyModel, LatencyParameters, LatencyStore
from tests.simulation.virtual_time import LoopClock, run_in_virtual_time, seeded_runtime

ROUND_S = 1.0


@dataclass(frozen=True, slots=True)
class Workload:
    """The work of both arms.

    Attributes:
        parameters: The store.
        writers: One PUT each per round, open loop.
        rounds: Of one second.
        per_process: Writers that share one uploader.
        critical_share: Share of PUTs that a checkpoint waits for.
    """

    parameters: LatencyParameters
    writers: int
    rounds: int
    per_process: int
    critical_share: float = 1.0

    @property
    def puts(self) -> int:
        """All PUTs."""
        return self.writers * self.rounds


@dataclass(slots=True)
class Arm:
    """The figures of one arm with one seed.

    Attributes:
        latency: Milliseconds from the intended start, by PUT; a row is a round.
        critical: Whether a checkpoint waits for it, likewise.
        slow: Whether its intended start is in a slow period, likewise.
        extra_at: When each request beyond the first of its upload was sent, in seconds.
        extra_slow: How many of these in slow periods.
        requests: PUTs sent.
        rejected: PUTs answered with 503.
        bytes_sent: Also of cancelled PUTs.
        failed: Uploads that failed and were begun again.
        counters: The recorder's.
    """

    latency: NDArray[np.float64]
    critical: NDArray[np.bool_]
    slow: NDArray[np.bool_]
    extra_at: list[float] = field(default_factory=list)
    extra_slow: int = 0
    requests: int = 0
    rejected: int = 0
    bytes_sent: float = 0.0
    failed: int = 0
    counters: Counter[str] = field(default_factory=Counter)


class _Counting(NullRecorder):
    """Keeps counters, forgets samples."""

    def __init__(self) -> None:
        self.counters: Counter[str] = Counter()

    def increment(self, name: str, value: float = 1.0) -> None:
        self.counters[name] += value  # type: ignore[assignment]


class SizeStore:
    """An inner store that confirms sizes and keeps nothing: a million bodies fit nowhere."""

    location = "memory://bench"

    async def put(self, name: str, data: bytes | memoryview, *, if_absent: bool = False) -> ObjectInfo:
        return ObjectInfo(name, len(data), 0.0)

    async def get(self, name: str, byte_range: ByteRange | None = None) -> bytes:
        raise ObjectNotFound(f"{name}: this store keeps nothing")

    async def head(self, name: str) -> ObjectInfo:
        raise ObjectNotFound(f"{name}: this store keeps nothing")

    async def list(self, prefix: str = "") -> AsyncGenerator[ObjectInfo, None]:
        nothing: tuple[ObjectInfo, ...] = ()
        for info in nothing:
            yield info

    async def delete(self, names: Sequence[str]) -> None:
        return None

    async def close(self) -> None:
        return None


class _Put:
    """One PUT of the schedule; begun again until it is stored."""

    __slots__ = ("body", "critical", "index", "intended", "run", "shard", "uploader")

    def __init__(
        self, run: _Run, index: int, intended: float, uploader: Uploader, body: tuple[bytes, int], critical: bool
    ) -> None:
        self.run = run
        self.index = index
        self.intended = intended
        self.uploader = uploader
        self.body = body
        self.critical = critical
        self.shard = index * 40503

    def start(self) -> None:
        body, checksum = self.body
        upload = self.uploader.submit(self.name, body, critical=self.critical, checksum=checksum)
        asyncio.ensure_future(upload).add_done_callback(self.done)

    def name(self, attempt: int) -> str:
        # Another first path element for each attempt.
        self.shard = (self.shard + 25717) & 0xFFFF
        if attempt:
            self.run.extra()
        return f"{self.shard:04x}/{self.index}-{attempt}"

    def done(self, future: asyncio.Future[StoredObject]) -> None:
        if future.exception() is not None:
            self.run.arm.failed += 1
            self.run.retry_later(self)
            return
        self.run.finished(self.index, self.intended)


class _Run:
    def __init__(self, workload: Workload, seed: int, policy: Callable[[], HedgePolicy] | None, hedge: bool) -> None:
        self._workload = w = workload
        self._loop = asyncio.get_running_loop()
        self._rng = np.random.default_rng([seed, 3])
        self._model = LatencyModel(w.parameters, seed, load=w.writers / ROUND_S)
        self._recorder = _Counting()
        self._stores: list[LatencyStore] = []
        self._uploaders: list[Uploader] = []
        for process in range((w.writers + w.per_process - 1) // w.per_process):
            store, hedge_store = (LatencyStore(SizeStore(), self._model) for _ in range(2))
            self._stores += [store, hedge_store]
            uploader = Uploader(
                store,
                runtime=seeded_runtime(seed * 1000 + process, LoopClock()),
                options=UploadOptions(),
                hedging=HedgingOptions(enabled=hedge),
                recorder=self._recorder,
                hedge_store=hedge_store,
            )
            if policy is not None:
                uploader.policy = policy()
            self._uploaders.append(uploader)
        self._bodies = {size: _body(size) for size, _ in w.parameters.sizes}
        shape = (w.rounds, w.writers)
        self.arm = Arm(np.zeros(w.puts), np.ones(shape, bool), np.zeros(shape, bool))
        self._latency = [0.0] * w.puts
        self._left = w.puts
        self._all_done = self._loop.create_future()

    async def run(self) -> Arm:
        self._begin_round(0)
        await self._all_done
        for uploader in self._uploaders:
            await uploader.close()
        arm = self.arm
        arm.latency = np.array(self._latency).reshape(arm.critical.shape) * 1e3
        arm.requests = sum(store.requests for store in self._stores)
        arm.rejected = sum(store.rejected for store in self._stores)
        arm.bytes_sent = sum(store.bytes_sent for store in self._stores)
        arm.counters = self._recorder.counters
        return arm

    def extra(self) -> None:
        now = self._loop.time()
        self.arm.extra_at.append(now)
        self.arm.extra_slow += self._model.is_slow(now)

    def retry_later(self, put: _Put) -> None:
        """Bytes of a failed upload go back to the buffer; the next checkpoint, a round later, begins them again."""

        def start() -> None:
            self.extra()
            put.start()

        self._loop.call_later(ROUND_S, start)

    def finished(self, index: int, intended: float) -> None:
        self._latency[index] = self._loop.time() - intended
        self._left -= 1
        if self._left == 0:
            self._all_done.set_result(None)

    def _begin_round(self, number: int) -> None:
        w = self._workload
        begin = number * ROUND_S
        sizes, weights = zip(*w.parameters.sizes, strict=True)
        starts = (begin + self._rng.random(w.writers) * w.parameters.jitter_ms / 1e3).tolist()
        which = self._rng.choice(len(sizes), w.writers, p=np.array(weights) / sum(weights)).tolist()
        critical = (self._rng.random(w.writers) < w.critical_share).tolist()
        self.arm.critical[number] = critical
        self.arm.slow[number] = [self._model.is_slow(start) for start in starts]
        for writer in range(w.writers):
            put = _Put(
                self,
                number * w.writers + writer,
                starts[writer],
                self._uploaders[writer // w.per_process],
                self._bodies[sizes[which[writer]]],
                critical[writer],
            )
            self._loop.call_at(starts[writer], put.start)
        if number + 1 < w.rounds:
            self._loop.call_at(begin + ROUND_S, self._begin_round, number + 1)


def _body(size: int) -> tuple[bytes, int]:
    body = bytes(size)
    return body, google_crc32c.value(body)


def run_arm(workload: Workload, seed: int, *, hedge: bool, policy: Callable[[], HedgePolicy] | None = None) -> Arm:
    """Run one arm.

    Args:
        workload: What is asked.
        seed: The same seed gives both arms the same schedule and the same slow periods.
        hedge: False for the baseline: same client, timeouts and retries.
        policy: Makes one policy for each process; None for the project's own.
    """

    async def run() -> Arm:
        return await _Run(workload, seed, policy, hedge).run()

    before = gc.get_threshold()
    gc.set_threshold(100_000, 20, 100)
    try:
        return run_in_virtual_time(run())
    finally:
        gc.set_threshold(*before)
