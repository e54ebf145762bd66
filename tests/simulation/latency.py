"""An object store as slow, as uneven and as limited as S3 is: a latency model, and a store that waits by it.

One attempt is connect (new connection only) + wait for capacity + transfer + commit. Slow connections, heavy tails
(some of which belong to the first path element of the name), slow periods of the whole store, finite capacity and
throttling all come from :class:`LatencyParameters`. It waits on the running loop: on a
:class:`~tests.simulation.virtual_time.VirtualTimeLoop` a million PUTs take a minute.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, fields
from math import exp, log

import numpy as np

from dstl.errors import Invalid, SlowDown
from dstl.store.base import ByteRange, ObjectInfo, ObjectStore

_CONNECT_SIGMA = 0.3
_CHUNK = 1 << 14


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyParameters:
    """One kind of store: milliseconds, bytes, MB/s (1e6 bytes), seconds where the name says ``slow_on``/``slow_off``.

    Attributes:
        sizes: (bytes, weight) of the bodies that a workload writes.
        body_med: Commit: lognormal median, with ``body_sig``.
        bw_med: Transfer: size / bandwidth, lognormal median, with ``bw_sig``.
        tail_p: Probability that Pareto(``tail_xm``, ``tail_alpha``), at most ``tail_cap``, is added to the commit.
        rho: Share of these tail events that belongs to the name's first path element: every attempt under it is hit
            while the event lasts, another escapes.
        connect_med: A new connection: lognormal median.
        conn_pool: Idle connections kept, last in first out.
        conn_life: Requests that a connection serves, x U(.5, 1.5).
        conn_p_slow: Share of connections whose transfer and commit take ``conn_factor`` times as long.
        p_blackhole: Probability that about ``blackhole`` passes before the body leaves.
        slow_off: Seconds between slow periods, x U(.5, 1.5), exponential first; 0 for none. ``slow_on`` likewise.
        slow_factor: Transfer and commit in a slow period; ``slow_tail_mult`` is for ``tail_p``.
        cap_norm: Capacity as a multiple of the primary load, first in first out; 0 for no limit; ``cap_on`` in slow
            periods.
        thr_rate: Token bucket of requests as a multiple of the primary load, ``thr_rate_on`` in slow periods;
            0 for none. It holds ``thr_burst`` seconds of primary load; empty means 503 after about ``reject``.
        reject_p: Probability that a request is answered 503 whatever the load.
        jitter_ms: Of the workload: writers start their PUTs within so long.
    """

    sizes: tuple[tuple[int, float], ...]
    body_med: float
    body_sig: float
    bw_med: float
    bw_sig: float
    tail_p: float = 0.0
    tail_xm: float = 100.0
    tail_alpha: float = 1.5
    tail_cap: float = 15000.0
    rho: float = 0.0
    connect_med: float = 8.0
    conn_pool: int = 4
    conn_life: float = 100.0
    conn_p_slow: float = 0.0
    conn_factor: float = 1.0
    p_blackhole: float = 0.0
    blackhole: float = 20000.0
    slow_off: float = 0.0
    slow_on: float = 0.0
    slow_factor: float = 1.0
    slow_tail_mult: float = 1.0
    cap_norm: float = 0.0
    cap_on: float = 0.0
    thr_rate: float = 0.0
    thr_burst: float = 0.0
    thr_rate_on: float = 0.0
    reject: float = 20.0
    reject_p: float = 0.0
    jitter_ms: float = 50.0

    @classmethod
    def of(cls, values: Mapping[str, object]) -> LatencyParameters:
        """Build from the mapping that a parameter file holds.

        Raises:
            Invalid: A name is unknown, a required one is missing, or a value makes no sense.
        """
        known = {field.name for field in fields(cls)}
        unknown = sorted(set(values) - known)
        if unknown:
            raise Invalid(f"unknown latency parameters {unknown}; known are {sorted(known)}")
        try:
            plain = {name: value for name, value in values.items() if name != "sizes"}
            sizes = tuple((int(size), float(weight)) for size, weight in values["sizes"])  # type: ignore[attr-defined]
            made = cls(sizes=sizes, **plain)  # type: ignore[arg-type]
            fine = made.body_med > 0 and made.bw_med > 0 and made.tail_alpha > 0 and len(sizes) > 0
        except (KeyError, TypeError, ValueError) as error:
            raise Invalid(f"latency parameters do not fit: {error!r}") from error
        if not fine or min(size for size, _ in sizes) <= 0:
            raise Invalid("latency parameters need sizes, body_med, bw_med and tail_alpha above zero")
        return made

    @property
    def mean_size(self) -> float:
        """Mean body in bytes."""
        weights = sum(weight for _, weight in self.sizes)
        return sum(size * weight for size, weight in self.sizes) / weights


class _Connection:
    __slots__ = ("factor", "left")

    def __init__(self, factor: float, left: float) -> None:
        self.factor = factor
        self.left = left


@dataclass(slots=True)
class LatencyPlan:
    """The course of one attempt, in seconds from its start.

    Attributes:
        body_from: The first byte of the body leaves.
        body_until: The last byte has left: from here on the object will be created, whoever still waits.
        until: The answer arrives.
        rejected: The answer is 503.
        connection: That carries it.
    """

    body_from: float
    body_until: float
    until: float
    rejected: bool
    connection: _Connection


class LatencyModel:
    """The store's side, shared by all its clients: random, from a seed.

    Args:
        parameters: The kind of store.
        seed: Everything random follows from it; slow periods from it alone, whatever is requested.
        load: PUTs per second of the primary load, to which capacity and throttling are relative.
    """

    def __init__(self, parameters: LatencyParameters, seed: int, load: float = 500.0) -> None:
        self.parameters = parameters
        self._rng = np.random.default_rng([seed, 1])
        self._periods = np.random.default_rng([seed, 2])
        self._normals: list[float] = []
        self._uniforms: list[float] = []
        p = parameters
        self._log_body = log(p.body_med / 1e3)
        self._log_rate = log(p.bw_med * 1e6)
        self._log_connect = log(max(p.connect_med, 1e-6) / 1e3)
        self._edges: list[float] = []  # off until [0], on until [1], off until [2], ...
        if p.slow_off > 0 and p.slow_on > 0:
            self._edges.append(float(self._periods.exponential(p.slow_off)))
        self._hot: dict[str, tuple[float, float]] = {}
        self._capacity_load = load * p.mean_size
        self._work = 0.0
        self._work_at = 0.0
        self._tokens = self._token_limit = max(1.0, p.thr_burst * load)
        self._token_load = load
        self._tokens_at = 0.0
        self._limited = p.cap_norm > 0 or p.cap_on > 0
        self._throttled = p.thr_rate > 0 or p.thr_rate_on > 0

    def is_slow(self, now: float) -> bool:
        """True in a slow period."""
        edges = self._edges
        if not edges:
            return False
        p = self.parameters
        while edges[-1] <= now:
            about = p.slow_on if len(edges) % 2 else p.slow_off
            edges.append(edges[-1] + about * float(self._periods.uniform(0.5, 1.5)))
        return bisect_right(edges, now) % 2 == 1

    def connect(self) -> tuple[_Connection, float]:
        """Open a connection; return it with the seconds that it takes."""
        p = self.parameters
        factor = p.conn_factor if self._uniform() < p.conn_p_slow else 1.0
        life = p.conn_life * (0.5 + self._uniform())
        return _Connection(factor, life), exp(self._log_connect + _CONNECT_SIGMA * self._normal())

    def put(self, now: float, name: str, size: int, connection: _Connection | None) -> LatencyPlan:
        """Plan one PUT that starts now, on an idle connection or a new one."""
        p = self.parameters
        begun = 0.0
        if connection is None:
            connection, begun = self.connect()
        slow = self.is_slow(now) if self._edges else False
        refused = self._throttled and not self._admitted(now, slow)
        if refused or (p.reject_p and self._uniform() < p.reject_p):
            answer = begun + p.reject / 1e3 * exp(_CONNECT_SIGMA * self._normal())
            return LatencyPlan(answer, answer, answer, True, connection)
        factor = connection.factor * p.slow_factor if slow else connection.factor
        if self._limited:
            begun += self._queued(now, size, slow)
        if p.p_blackhole and self._uniform() < p.p_blackhole:
            begun += p.blackhole / 1e3 * (0.5 + self._uniform())
        transfer = size * factor * exp(p.bw_sig * self._normal() - self._log_rate)
        commit = factor * exp(self._log_body + p.body_sig * self._normal())
        tail_p = p.tail_p * p.slow_tail_mult if slow else p.tail_p
        if self._uniform() < tail_p:
            tail = min(p.tail_xm * (1.0 - self._uniform()) ** (-1.0 / p.tail_alpha), p.tail_cap) / 1e3
            commit += tail
            if self._uniform() < p.rho:
                self._heat(now, name, tail)
        elif self._hot:
            until, tail = self._hot.get(name.partition("/")[0], (0.0, 0.0))
            if now < until:
                commit += tail
        sent = begun + transfer
        return LatencyPlan(begun, sent, sent + commit, False, connection)

    def small(self) -> float:
        """Seconds of a request without a body."""
        return exp(self._log_body + self.parameters.body_sig * self._normal())

    def read(self, size: int) -> float:
        """Seconds until so many bytes have come."""
        return self.small() + size * exp(self.parameters.bw_sig * self._normal() - self._log_rate)

    def _heat(self, now: float, name: str, tail: float) -> None:
        if len(self._hot) > 1000:
            self._hot = {first: hot for first, hot in self._hot.items() if hot[0] > now}
        self._hot[name.partition("/")[0]] = (now + tail, tail)

    def _admitted(self, now: float, slow: bool) -> bool:
        p = self.parameters
        rate = (p.thr_rate_on if slow and p.thr_rate_on > 0 else p.thr_rate) * self._token_load
        if rate <= 0:
            return True
        self._tokens = min(self._token_limit, self._tokens + (now - self._tokens_at) * rate)
        self._tokens_at = now
        if self._tokens < 1.0:
            return False
        self._tokens -= 1.0
        return True

    def _queued(self, now: float, size: int, slow: bool) -> float:
        p = self.parameters
        rate = (p.cap_on if slow and p.cap_on > 0 else p.cap_norm) * self._capacity_load
        if rate <= 0:
            return 0.0
        self._work = max(0.0, self._work - (now - self._work_at) * rate)
        self._work_at = now
        wait = self._work / rate
        self._work += size
        return wait

    def _normal(self) -> float:
        if not self._normals:
            self._normals = self._rng.standard_normal(_CHUNK).tolist()
        return self._normals.pop()

    def _uniform(self) -> float:
        if not self._uniforms:
            self._uniforms = self._rng.random(_CHUNK).tolist()
        return self._uniforms.pop()


class LatencyStore:
    """One client of a slow store: its own connection pool over an inner store that keeps the objects.

    Invariants:
        1. An object appears when its answer would arrive, also when the caller has been cancelled after the body left;
           cancelled earlier, it never does.
        2. Cancelling closes the connection.

    Belongs to one event loop, and waits on its clock.

    Args:
        inner: Keeps the objects.
        model: The store's side; shared by all clients of the same store.

    Attributes:
        requests: PUTs begun.
        rejected: PUTs answered with 503.
        bytes_sent: Of bodies, also of cancelled PUTs.
        late: Objects created after their PUT was cancelled.
    """

    def __init__(self, inner: ObjectStore, model: LatencyModel) -> None:
        self.inner = inner
        self._model = model
        self._idle: list[_Connection] = []
        self._late: set[asyncio.Task[ObjectInfo]] = set()
        self.requests = self.rejected = self.late = 0
        self.bytes_sent = 0.0

    @property
    def location(self) -> str:
        """The inner store's."""
        return self.inner.location

    async def put(self, name: str, data: bytes | memoryview, *, if_absent: bool = False) -> ObjectInfo:
        """Store an object after the time that the model takes for it.

        Raises:
            SlowDown: The model throttles.
        """
        loop = asyncio.get_running_loop()
        now = loop.time()
        size = len(data)
        plan = self._model.put(now, name, size, self._idle.pop() if self._idle else None)
        self.requests += 1
        answer: asyncio.Future[None] = loop.create_future()
        timer = loop.call_at(now + plan.until, answer.set_result, None)
        try:
            await answer
        except asyncio.CancelledError:
            timer.cancel()
            self._cut(plan, loop.time() - now, name, data, if_absent)
            raise
        self._release(plan.connection)
        if plan.rejected:
            self.rejected += 1
            raise SlowDown(f"503 SlowDown for {name}: the store asks for less; lower the rate")
        self.bytes_sent += size
        return await self.inner.put(name, data, if_absent=if_absent)

    async def get(self, name: str, byte_range: ByteRange | None = None) -> bytes:
        """Return an object's bytes after one commit time and the transfer."""
        data = await self.inner.get(name, byte_range)
        await asyncio.sleep(self._model.read(len(data)))
        return data

    async def head(self, name: str) -> ObjectInfo:
        """Return size and age of an object after one commit time."""
        await asyncio.sleep(self._model.small())
        return await self.inner.head(name)

    async def list(self, prefix: str = "") -> AsyncGenerator[ObjectInfo, None]:
        """Yield objects in name order, after one commit time."""
        await asyncio.sleep(self._model.small())
        async for info in self.inner.list(prefix):
            yield info

    async def delete(self, names: Sequence[str]) -> None:
        """Delete objects after one commit time."""
        await asyncio.sleep(self._model.small())
        await self.inner.delete(names)

    async def close(self) -> None:
        """Forget connections and wait for late objects. Idempotent; the inner store stays open."""
        self._idle.clear()
        if self._late:
            await asyncio.wait(self._late)

    def _release(self, connection: _Connection) -> None:
        connection.left -= 1
        if connection.left >= 1 and len(self._idle) < self._model.parameters.conn_pool:
            self._idle.append(connection)

    def _cut(self, plan: LatencyPlan, age: float, name: str, data: bytes | memoryview, if_absent: bool) -> None:
        if plan.rejected or age <= plan.body_from:
            return
        if age < plan.body_until:
            self.bytes_sent += len(data) * (age - plan.body_from) / (plan.body_until - plan.body_from)
            return
        self.bytes_sent += len(data)
        self.late += 1
        late = asyncio.get_running_loop().create_task(self._create_late(plan.until - age, name, data, if_absent))
        self._late.add(late)
        late.add_done_callback(self._late.discard)

    async def _create_late(self, after: float, name: str, data: bytes | memoryview, if_absent: bool) -> ObjectInfo:
        await asyncio.sleep(after)
        return await self.inner.put(name, data, if_absent=if_absent)
