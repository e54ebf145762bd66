import asyncio
import os
from pathlib import Path

import pytest

from dstl.errors import AccessDenied, DstlError, Invalid, ObjectExists, Unavailable
from dstl.options import S3Options
from dstl.runtime import SystemClock
from dstl.store import LocalStore, MemoryStore, S3Store, probe
from dstl.store.base import ObjectInfo
from dstl.store.location import open_store
from tests.simulation.faulty_store import Fault, FaultRule, FaultyStore
from tests.simulation.virtual_time import seeded_runtime
from worlds.s3_server import S3Server


class _Hasty(SystemClock):
    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(0)


HASTY = seeded_runtime(1, _Hasty())


async def test_a_good_location_passes_and_is_left_as_it_was(tmp_path: Path) -> None:
    for store in (MemoryStore(), LocalStore(tmp_path / "new")):
        await probe(store)
        await probe(store)
        assert not [info async for info in store.list()]


async def test_a_directory_that_somebody_else_can_change_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its owner, or anybody, may put other manifests there, and nothing would say so."""
    own, shared = tmp_path / "own", tmp_path / "shared"
    own.mkdir(0o700)
    shared.mkdir()
    shared.chmod(0o777)
    await probe(LocalStore(own))
    await probe(MemoryStore())
    assert not caplog.records
    await probe(open_store(f"{own},{shared}"))
    assert [str(shared) in record.getMessage() for record in caplog.records] == [True]
    if os.geteuid() == 0:
        caplog.clear()
        os.chown(own, 65534, 65534)
        await probe(LocalStore(own))
        assert "is of user 65534" in caplog.text


async def test_s3_is_probed_with_five_requests(s3_bucket: str, s3_options: S3Options, s3_server: S3Server) -> None:
    store = S3Store(s3_bucket, "job", s3_options)
    await probe(store)
    await store.close()
    assert dict(s3_server.requests) == {"PUT": 2, "GET": 2, "DELETE": 1}


@pytest.mark.parametrize(("method", "operation"), [("PUT", "PutObject"), ("GET", "GetObject"), ("DELETE", "Delete")])
async def test_each_missing_permission_is_named(
    s3_bucket: str, s3_options: S3Options, s3_server: S3Server, method: str, operation: str
) -> None:
    store = S3Store(s3_bucket, "job", s3_options)
    s3_server.fail("error", method=method, status=403, code="AccessDenied", times=9)
    with pytest.raises(AccessDenied, match=operation) as caught:
        await probe(store)
    await store.close()
    assert f"cannot use s3://{s3_bucket}/job" in str(caught.value)


async def test_a_missing_list_permission_is_named(s3_bucket: str, s3_options: S3Options, s3_server: S3Server) -> None:
    store = S3Store(s3_bucket, "job", s3_options)
    s3_server.fail("error", method="GET", path="list-type=2", status=403, code="AccessDenied")
    with pytest.raises(AccessDenied, match="ListObjectsV2"):
        await probe(store)
    assert not [info async for info in store.list()]
    await store.close()


async def test_a_missing_bucket_and_a_dead_endpoint(s3_options: S3Options, s3_server: S3Server) -> None:
    missing = S3Store("no-such-bucket", "", s3_options)
    with pytest.raises(Invalid, match=r"no-such-bucket.*make the bucket"):
        await probe(missing)
    await missing.close()
    dead = S3Store("bucket", "", S3Options(endpoint_url="http://127.0.0.1:1"))
    with pytest.raises(Unavailable, match=r"127\.0\.0\.1:1"):
        await probe(dead, runtime=HASTY)
    await dead.close()


class _Forgetful(MemoryStore):
    """A store that ignores If-None-Match, as some servers do."""

    async def put(self, name: str, data: bytes | memoryview, *, if_absent: bool = False) -> ObjectInfo:
        return await super().put(name, data)


async def test_a_directory_that_can_never_be_is_refused_at_once_and_in_one_line(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with pytest.raises(Invalid, match="no directory /proc/nope can be made; choose another location"):
        await probe(LocalStore("/proc/nope"), runtime=HASTY)
    assert caplog.records == []


async def test_a_store_that_ignores_conditional_puts_is_refused() -> None:
    store = _Forgetful()
    with pytest.raises(Invalid, match="two drivers could both commit"):
        await probe(store)
    assert not [info async for info in store.list()]


@pytest.mark.parametrize(
    ("fault", "verb", "expected"),
    [
        (Fault.UNAVAILABLE, "put", Unavailable),
        (Fault.LOST_RESPONSE, "put", Unavailable),
        (Fault.CORRUPT_GET, "get", Invalid),
        (Fault.STUCK, "get", Unavailable),
        (Fault.STALE_LIST, "list", Invalid),
    ],
)
async def test_a_store_in_trouble_is_refused_with_its_name(fault: Fault, verb: str, expected: type[DstlError]) -> None:
    store = FaultyStore(MemoryStore("in-trouble"), [FaultRule(fault, verb, chance=1.0, delay_s=60)])
    with pytest.raises(expected, match="memory://in-trouble") as caught:
        await probe(store, runtime=HASTY, timeout_s=0.5)
    assert type(caught.value) is expected
    assert not isinstance(caught.value, ObjectExists)


@pytest.mark.parametrize("of_put", [Fault.UNAVAILABLE, Fault.LOST_RESPONSE])
async def test_each_request_may_fail_some_times_before_a_driver_is_refused_its_start(of_put: Fault) -> None:
    """The chaos job has found it: the probe began with its first request again wherever the store had failed one."""
    inner = MemoryStore(f"fails-often-{of_put}")
    rules = [FaultRule(of_put, "put", nth=(1, 2, 3, 5, 6))]
    rules += [FaultRule(Fault.UNAVAILABLE, verb, nth=(1, 2, 3)) for verb in ("get", "list", "delete")]
    store = FaultyStore(inner, rules)
    await probe(store, runtime=HASTY)
    assert not [info async for info in inner.list()]
    # Of an object that is there, a put that is repeated says so, whether or not its answer is the one to be lost.
    assert store.calls["put"] == (7 if of_put is Fault.UNAVAILABLE else 5)
    assert (store.calls["get"], store.calls["list"], store.calls["delete"]) == (4, 4, 4)
