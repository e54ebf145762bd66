"""The latency model has the distribution that its parameters state, and its store keeps the protocol's promises."""

import asyncio

import numpy as np
import pytest

from bench._models import models
from dstl.errors import Invalid
from dstl.store.memory import MemoryStore
from tests.simulation.latency import LatencyModel, LatencyParameters, LatencyStore
from tests.simulation.virtual_time import LoopClock, virtual

PLAIN = LatencyParameters(
    sizes=((1_000_000, 1.0),), body_med=50, body_sig=0.0, bw_med=10, bw_sig=0.0, connect_med=8, reject=20
)


def _but(**changes: object) -> LatencyParameters:
    plain = {name: getattr(PLAIN, name) for name in LatencyParameters.__dataclass_fields__}
    return LatencyParameters(**{**plain, **changes})


def test_parameters_take_every_set_of_the_bench():
    for name, values in models().items():
        mean = sum(size * weight for size, weight in values["sizes"]) / sum(weight for _, weight in values["sizes"])
        assert LatencyParameters.of(values).mean_size == pytest.approx(mean), name


@pytest.mark.parametrize(
    "values",
    [{"nonsense": 1}, {}, {**models()["brownout"], "sizes": []}, {**models()["brownout"], "body_med": 0}],
)
def test_parameters_refuse_what_makes_no_sense(values):
    with pytest.raises(Invalid):
        LatencyParameters.of(values)


@pytest.mark.parametrize("seed", [1, 2, 3])  # a bound on a sample: not for every seed
def test_transfer_and_commit_medians_on_a_kept_connection(seed):
    parameters = LatencyParameters.of(models()["s3-standard-small"])
    model = LatencyModel(parameters, seed)
    connection, _ = model.connect()
    connection.factor = 1.0
    plans = [model.put(0.0, f"{i}/x", 131072, connection) for i in range(20_000)]
    commit = np.array([plan.until - plan.body_until for plan in plans])
    transfer = np.array([plan.body_until - plan.body_from for plan in plans])
    assert np.median(commit) * 1e3 == pytest.approx(52, rel=0.03)
    assert np.median(transfer) * 1e3 == pytest.approx(131072 / 25e6 * 1e3, rel=0.03)
    assert np.mean(commit > 0.5) == pytest.approx(0.008 * (160 / 450) ** 1.25, rel=0.4)


def test_slow_periods_follow_from_the_seed_alone(seed):
    parameters = LatencyParameters.of(models()["brownout"])
    one, other = LatencyModel(parameters, seed), LatencyModel(parameters, seed)
    for i in range(100):
        one.put(i / 10, f"{i}/x", 1000, None)
    times = np.arange(0, 20_000, 1.0)
    slow = [one.is_slow(t) for t in times]
    assert slow == [other.is_slow(t) for t in times]
    assert np.mean(slow) == pytest.approx(40 / 280, rel=0.35)


def test_tail_of_a_first_path_element_hits_every_attempt_under_it_and_no_other():
    model = LatencyModel(_but(tail_p=1.0, rho=1.0, tail_xm=1000, tail_alpha=50.0), 1)
    connection, _ = model.connect()
    hit = model.put(0.0, "aa/1", 1000, connection)
    assert hit.until > 1.0
    calm = LatencyModel(_but(tail_p=0.0), 1)
    calm._hot = model._hot
    assert calm.put(0.1, "aa/2", 1000, connection).until > 1.0
    assert calm.put(0.1, "bb/2", 1000, connection).until < 0.2
    assert calm.put(9.0, "aa/3", 1000, connection).until < 0.2


def test_capacity_makes_a_queue_that_drains():
    model = LatencyModel(_but(cap_norm=1.0), 1, load=10.0)  # 10 MB/s
    connection, _ = model.connect()
    waits = [model.put(0.0, f"{i}/x", 1_000_000, connection).body_from for i in range(5)]
    assert waits == pytest.approx([0.0, 0.1, 0.2, 0.3, 0.4])
    assert model.put(0.25, "x/x", 1_000_000, connection).body_from == pytest.approx(0.25)


def test_throttle_lets_through_its_rate_and_its_burst():
    model = LatencyModel(_but(thr_rate=0.5, thr_burst=2.0), 1, load=10.0)
    connection, _ = model.connect()
    answers = [model.put(i / 100, f"{i}/x", 1000, connection).rejected for i in range(1000)]
    assert answers[:20] == [False] * 20
    assert 1000 - sum(answers) == pytest.approx(20 + 10 * 5, abs=2)


def _store(parameters: LatencyParameters) -> tuple[MemoryStore, LatencyStore]:
    inner = MemoryStore(clock=LoopClock())
    return inner, LatencyStore(inner, LatencyModel(parameters, 1))


@virtual
@pytest.mark.parametrize(("cancel_after", "sent", "appears"), [(0.15, 1_000_000, True), (0.06, None, False)])
async def test_cancelled_put_creates_its_object_late_only_if_its_body_had_left(cancel_after, sent, appears):
    inner, store = _store(_but(connect_med=0.001))
    task = asyncio.get_running_loop().create_task(store.put("a/b", bytes(1_000_000)))
    await asyncio.sleep(cancel_after - 0.03)
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()
    assert [info.name async for info in inner.list()] == []
    await asyncio.sleep(1)
    assert ([info.name async for info in inner.list()] == ["a/b"]) is appears
    if sent is None:
        assert 0 < store.bytes_sent < 1_000_000
    else:
        assert store.bytes_sent == sent
    assert store.late == appears
    await store.close()
