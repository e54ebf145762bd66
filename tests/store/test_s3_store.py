"""What only S3 does: outcomes of broken requests, parts, encryption, credentials."""

import asyncio
import base64
import hashlib
import os
import subprocess
import sys
import warnings
from collections.abc import AsyncIterator
from pathlib import Path

import google_crc32c
import pytest

from dstl.errors import (
    AccessDenied,
    Closed,
    DstlError,
    Invalid,
    ObjectExists,
    OutcomeUnknown,
    SlowDown,
    Unavailable,
)
from dstl.options import S3Options
from dstl.store import S3Store, probe
from dstl.store.s3_client import S3Client, _models
from worlds.s3_server import S3Server

BIG = bytes(range(256)) * (12 << 12)  # 12 MB: three parts of 5 MB


@pytest.fixture
async def store(s3_bucket: str, s3_options: S3Options) -> AsyncIterator[S3Store]:
    store = S3Store(s3_bucket, "job", s3_options)
    yield store
    await store.close()


async def _uploads(bucket: str, options: S3Options) -> list[str]:
    client = S3Client(options)
    try:
        answer = await client.call("list_multipart_uploads", Bucket=bucket)
        return [one["Key"] for one in answer.get("Uploads", ())]
    finally:
        await client.close()


async def test_a_bucket_that_lists_in_no_order_is_refused_and_not_taken_for_an_older_state(
    store: S3Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S3's directory buckets do: a driver would fence behind an old manifest, and commit where nobody looks."""
    for number in range(3):
        await store.put(f"manifests/{number}", b"a record")
    call, bucket = store._client.call, store._bucket

    async def unordered(operation: str, **arguments: object) -> dict[str, object]:
        answer = await call(operation, **(arguments | {"Bucket": bucket}))
        return answer | {"Contents": answer["Contents"][::-1]}

    names = [f"manifests/{number}" for number in range(3)]
    assert [info.name async for info in store.list("manifests/")] == names
    monkeypatch.setattr(store._client, "call", unordered)
    with pytest.raises(Invalid, match="not listed in the order of names"):
        assert [info async for info in store.list("manifests/")]
    # A bucket of S3 Express is known by its name, and what it lists is sorted here.
    monkeypatch.setattr(store, "_bucket", f"{bucket}--use1-az4--x-s3")
    assert [info.name async for info in store.list("manifests/")] == names


async def test_a_server_that_lists_folder_by_folder_is_not_refused_for_two_savepoints_of_like_names(
    store: S3Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SeaweedFS does: ``before/`` comes before ``before-upgrade/`` there, and after it on S3."""
    names = ["savepoints/before/a", "savepoints/before-upgrade/a", "savepoints/before-upgrade/b"]
    for name in names:
        await store.put(name, b"")
    call = store._client.call

    async def by_folder(operation: str, **arguments: object) -> dict[str, object]:
        answer = await call(operation, **arguments)
        return answer | {"Contents": sorted(answer["Contents"], key=lambda found: found["Key"].split("/"))}

    monkeypatch.setattr(store._client, "call", by_folder)
    assert [info.name async for info in store.list()] == names


async def test_a_lost_answer_is_unknown_and_never_repeated_behind_our_back(store: S3Store, s3_server: S3Server) -> None:
    # aiohttp repeats a PUT on its own when a kept connection breaks; a conditional one would then meet itself.
    await store.put("warm", b"the connection is kept")
    s3_server.fail("lost", method="PUT")
    with pytest.raises(OutcomeUnknown, match=r"PutObject s3://.*/job/x"):
        await store.put("x", b"stored all the same", if_absent=True)
    assert s3_server.requests["PUT"] == 2
    assert await store.get("x") == b"stored all the same"


async def test_silence_after_a_put_is_unknown(s3_bucket: str, s3_options: S3Options, s3_server: S3Server) -> None:
    store = S3Store(s3_bucket, options=s3_options.model_copy(update={"read_timeout_s": 0.2}))
    s3_server.latency_s = 1.0
    with pytest.raises(OutcomeUnknown):
        await store.put("x", b"1")
    with pytest.raises(Unavailable):
        await store.get("x")
    await store.close()


@pytest.mark.parametrize(
    ("status", "code", "put_error", "get_error"),
    [
        (503, "SlowDown", SlowDown, SlowDown),
        (503, "ServiceUnavailable", SlowDown, SlowDown),
        (429, "TooManyRequests", SlowDown, SlowDown),
        (400, "ThrottlingException", SlowDown, SlowDown),
        (500, "InternalError", OutcomeUnknown, Unavailable),
        (502, "BadGateway", OutcomeUnknown, Unavailable),
        (400, "RequestTimeout", Unavailable, Unavailable),
        (400, "BadDigest", Unavailable, Unavailable),
        (409, "ConditionalRequestConflict", Unavailable, Unavailable),
        (403, "AccessDenied", AccessDenied, AccessDenied),
        (403, "InvalidAccessKeyId", AccessDenied, AccessDenied),
        (403, "RequestTimeTooSkewed", AccessDenied, AccessDenied),
        (404, "NoSuchBucket", Invalid, Invalid),
        (400, "AuthorizationHeaderMalformed", Invalid, Invalid),
        (400, "KMS.DisabledException", Invalid, Invalid),
        (400, "InvalidRequest", Invalid, Invalid),
    ],
)
async def test_each_refusal_has_its_kind_and_is_not_retried(
    store: S3Store,
    s3_server: S3Server,
    status: int,
    code: str,
    put_error: type[DstlError],
    get_error: type[DstlError],
) -> None:
    s3_server.fail("error", status=status, code=code, times=100)
    for operation, call, expected in (
        ("PutObject", store.put("x", b"1", if_absent=True), put_error),
        ("GetObject", store.get("x"), get_error),
    ):
        with pytest.raises(DstlError) as caught:
            await call
        assert type(caught.value) is expected
        for word in (operation, store.location, code):
            assert word in str(caught.value)
        assert os.environ["AWS_SECRET_ACCESS_KEY"] not in str(caught.value)
    assert len(s3_server.fired) == 2


@pytest.mark.parametrize(
    ("status", "code", "text"),
    [
        (503, "", "upstream connect error or disconnect/reset before headers. reset reason: connection termination"),
        (503, "", "<html><body><h1>503 Service Unavailable</h1>No server is available.</body></html>"),
        (429, "", "too many requests"),
        (503, "SlowDownWrite", ""),
    ],
)
async def test_a_503_that_is_not_s3s_own_says_nothing_of_a_put(
    store: S3Store, s3_server: S3Server, status: int, code: str, text: str
) -> None:
    """Gateways answer so, too, when their server has carried the PUT out and then ended the connection."""
    s3_server.fail("stored", method="PUT", status=status, code=code, text=text)
    with pytest.raises(OutcomeUnknown, match=r"PutObject s3://.*/job/x.*may or may not be stored"):
        await store.put("x", b"1", if_absent=True)
    assert await store.get("x") == b"1"
    s3_server.fail("error", status=status, code=code, text=text)
    with pytest.raises(SlowDown):
        await store.get("x")


async def test_a_refused_connection_is_certain(s3_server: S3Server) -> None:
    store = S3Store("bucket", options=S3Options(endpoint_url="http://127.0.0.1:1"))
    with pytest.raises(Unavailable, match="nothing was sent"):
        await store.put("x", b"1")
    await store.close()


async def test_expired_credentials_are_read_anew_once(store: S3Store, s3_server: S3Server) -> None:
    s3_server.fail("error", status=400, code="ExpiredToken")
    await store.put("x", b"1", if_absent=True)
    assert s3_server.requests["PUT"] == 2
    s3_server.fail("error", status=400, code="ExpiredToken", times=2)
    with pytest.raises(AccessDenied, match="renew the credentials"):
        await store.put("y", b"1")
    assert s3_server.requests["PUT"] == 4
    await store.put("y", b"1")


async def test_many_requests_that_meet_an_expiry_together_share_the_new_client(
    store: S3Store, s3_server: S3Server
) -> None:
    await store.put("warm", b"1")
    s3_server.latency_s = 0.05
    s3_server.fail("error", status=400, code="ExpiredToken", times=8)
    await asyncio.gather(*(store.put(f"x{number}", b"1") for number in range(8)))
    assert len(store._client._retired) == 1


async def test_no_credentials_is_access_denied(
    s3_bucket: str, s3_options: S3Options, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    store = S3Store(s3_bucket, options=s3_options)
    with pytest.raises(AccessDenied, match="no AWS credentials found"):
        await store.put("x", b"1")
    await store.close()


async def test_a_profile_that_there_is_not_is_no_outage(
    s3_bucket: str, s3_options: S3Options, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was Unavailable, and a put of unknown outcome: tried again, and the query restarted for ever."""
    monkeypatch.setenv("AWS_PROFILE", "of-another-host")
    lost = S3Store(s3_bucket, "job", s3_options)
    for call in (lost.put("a", b"x"), lost.get("a")):
        with pytest.raises(Invalid, match=r"profile \(of-another-host\) could not be found; correct AWS_PROFILE"):
            await call
    await lost.close()


async def test_the_checksum_travels_with_the_body(store: S3Store, s3_server: S3Server) -> None:
    await store.put("x", b"some bytes")
    sent = s3_server.log[-1].headers["x-amz-checksum-crc32c"]
    assert base64.b64decode(sent) == google_crc32c.value(b"some bytes").to_bytes(4, "big")
    assert "expect" not in s3_server.log[-1].headers  # a further round trip per PUT


async def test_a_length_that_no_checksum_confirms_is_asked_for(store: S3Store, s3_server: S3Server) -> None:
    """Before, the length that ``put`` returned was what it had been given, whatever was stored."""
    assert (await store.put("checked", b"some bytes")).size == 10
    assert s3_server.requests["HEAD"] == 0
    s3_server.fail("unchecked", method="PUT")
    assert (await store.put("x", b"some bytes", if_absent=True)).size == 10
    assert s3_server.requests["HEAD"] == 1
    s3_server.fail("short", method="PUT")
    with pytest.raises(OutcomeUnknown, match=r"PutObject s3://.*/job/y: S3 has stored 9 bytes of 10"):
        await store.put("y", b"some bytes", if_absent=True)
    s3_server.fail("short", method="PUT", path="partNumber=3")
    with pytest.raises(OutcomeUnknown, match=rf"PutObject s3://.*/job/large: S3 has stored {len(BIG) - 1} bytes of"):
        await store.put("large", BIG)
    s3_server.fail("unchecked", method="PUT")
    s3_server.fail("error", method="HEAD")
    with pytest.raises(OutcomeUnknown, match=r"PutObject s3://.*/job/z was answered, .*could not be confirmed"):
        await store.put("z", b"some bytes")


async def test_encryption_and_owner_are_asked_for(s3_bucket: str, s3_options: S3Options, s3_server: S3Server) -> None:
    options = s3_options.model_copy(update={"sse_kms_key_id": "alias/dstl", "expected_bucket_owner": "123456789012"})
    store = S3Store(s3_bucket, options=options)
    await store.put("small", b"1")
    await store.put("large", BIG)
    await store.get("small")
    await store.head("small")
    await store.delete(["small"])
    [info async for info in store.list()]
    await store.close()
    assert len(s3_server.log) == 11
    assert all(one.headers["x-amz-expected-bucket-owner"] == "123456789012" for one in s3_server.log)
    encrypted = [one for one in s3_server.log if "x-amz-server-side-encryption" in one.headers]
    assert [one.method for one in encrypted] == ["PUT", "POST"]
    for one in encrypted:
        assert one.headers["x-amz-server-side-encryption"] == "aws:kms"
        assert one.headers["x-amz-server-side-encryption-aws-kms-key-id"] == "alias/dstl"
        assert one.headers["x-amz-server-side-encryption-bucket-key-enabled"] == "true"


async def test_a_large_object_is_put_as_conditionally_as_the_probe_has_tried_it(
    store: S3Store, s3_server: S3Server
) -> None:
    """Some servers honour If-None-Match where one request makes the object, and ignore it where parts are completed."""
    s3_server.fail("unconditional", method="POST", times=100)
    await probe(store)
    s3_server.log.clear()
    await store.put("manifest", BIG, if_absent=True)
    (request,) = s3_server.log
    assert (request.method, request.headers["if-none-match"]) == ("PUT", "*")
    with pytest.raises(ObjectExists):
        await store.put("manifest", BIG[::-1], if_absent=True)
    assert await store.get("manifest") == BIG


async def test_a_failed_part_is_certain_and_aborts(
    store: S3Store, s3_bucket: str, s3_options: S3Options, s3_server: S3Server
) -> None:
    s3_server.fail("lost", method="PUT", path="partNumber=2")
    with pytest.raises(Unavailable, match="UploadPart"):
        await store.put("large", BIG)
    await store.close()
    assert await _uploads(s3_bucket, s3_options) == []
    assert s3_server.requests["POST"] == 1  # created, never completed


async def test_a_lost_answer_to_the_completion_is_unknown_and_the_abort_harmless(
    store: S3Store, s3_server: S3Server
) -> None:
    s3_server.fail("lost", method="POST", path="uploadId")
    with pytest.raises(OutcomeUnknown, match="CompleteMultipartUpload"):
        await store.put("large", BIG)
    assert await store.get("large") == BIG


async def test_an_error_inside_a_good_answer_is_seen(store: S3Store, s3_server: S3Server) -> None:
    # S3 may begin to answer a completion with 200 and then fail.
    s3_server.fail("error", method="POST", path="uploadId", status=200, code="InternalError")
    with pytest.raises(OutcomeUnknown):
        await store.put("large", BIG)


async def test_names_that_s3_would_not_delete_are_reported(store: S3Store, s3_server: S3Server) -> None:
    for code, kind in (("AccessDenied", AccessDenied), ("SlowDown", SlowDown), ("InternalError", Unavailable)):
        refusal = f"<Error><Key>job/b</Key><Code>{code}</Code></Error>"
        s3_server.fail("error", method="POST", status=200, text=f"<DeleteResult>{refusal}</DeleteResult>")
        with pytest.raises(kind, match=r"1 of 2 refused.*job/b"):
            await store.delete(["a", "b"])


async def test_a_large_object_takes_a_request_for_each_part_and_three_more(store: S3Store, s3_server: S3Server) -> None:
    await store.put("large", BIG)
    assert s3_server.requests == {"POST": 2, "PUT": 3, "HEAD": 1}


async def test_foreign_keys_are_passed_over(s3_bucket: str, s3_options: S3Options) -> None:
    client = S3Client(s3_options)
    for key in ("job/ours", "job/not ours", "job/", "job/a//b", "job2/x"):
        await client.call("put_object", Bucket=s3_bucket, Key=key, Body=b"")
    await client.close()
    store = S3Store(s3_bucket, "job", s3_options)
    assert [info.name async for info in store.list()] == ["ours"]
    await store.close()


def test_one_store_serves_one_loop_after_another(s3_bucket: str, s3_options: S3Options, s3_server: S3Server) -> None:
    store = S3Store(s3_bucket, options=s3_options)

    async def once(body: bytes) -> None:
        await store.put(f"n{len(body)}", body)
        client = store._client
        opened = client._opened.pop(asyncio.get_running_loop())
        await opened.result().stack.aclose()

    asyncio.run(once(b"1"))
    asyncio.run(once(b"22"))
    assert s3_server.requests["PUT"] == 2


@pytest.mark.skipif(not hasattr(os, "fork"), reason="POSIX")
async def test_a_forked_child_is_refused(store: S3Store) -> None:
    await store.put("x", b"1")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # 3.12 and later warn of forks beside threads
        child = os.fork()
    if child == 0:
        try:
            store._client._opening()
        except Closed as error:
            os._exit(0 if "fork" in str(error) else 2)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0  # noqa: ASYNC222 - it ends at once
    assert await store.get("x") == b"1"


async def test_without_the_extra_a_sentence_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "aiobotocore.session", None)
    _models.cache_clear()
    store = S3Store("bucket")
    with pytest.raises(Invalid, match=r"pip install 'dstl-pyspark\[s3\]'"):
        await store.get("x")
    await store.close()


async def test_aiobotocore_alone_is_enough(monkeypatch: pytest.MonkeyPatch, store: S3Store) -> None:
    monkeypatch.setitem(sys.modules, "aioboto3", None)
    await store.put("x", b"1")
    assert await store.get("x") == b"1"


def test_opening_a_store_imports_no_sdk() -> None:
    # Spark's Python workers import dstl; the SDK would cost each of them a second and 49 MB.
    program = (
        "import sys; from dstl.store import open_store; open_store('s3://bucket/prefix');"
        "print([name for name in sys.modules if name.partition('.')[0] in"
        " ('boto3', 'botocore', 'aioboto3', 'aiobotocore', 'aiohttp')])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


async def test_a_large_put_lets_the_loop_turn(store: S3Store) -> None:
    turns = 0
    putting = asyncio.create_task(store.put("x", bytes(4 << 20)))
    while not putting.done():
        await asyncio.sleep(0)
        turns += 1
    await putting
    assert turns > 16  # at least once per slice of 256 KB


@pytest.mark.parametrize(
    "options",
    [
        {"endpoint_url": "http://user:secret@host"},
        {"endpoint_url": "host:9000"},
        {"expected_bucket_owner": "me"},
        {"multipart_part_size": 1 << 20},
        {"aws_secret_access_key": "x"},
    ],
)
def test_options_refuse_what_cannot_work(options: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="validation error"):
        S3Options(**options)  # type: ignore[arg-type]


async def _signed_payload(store: S3Store) -> bytes:
    """Return what a PUT would say of its body; nothing listens at the endpoint."""
    opened = await store._client._opening()
    sent: list[bytes] = []
    opened.client.meta.events.register(
        "before-send.s3", lambda request, **_: sent.append(request.headers["X-Amz-Content-SHA256"])
    )
    with pytest.raises(Unavailable):
        await store.put("x", b"body")
    await store.close()
    return sent[0]


async def test_bodies_are_signed_unless_tls_protects_them(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    signed = hashlib.sha256(b"body").hexdigest().encode()
    over_tls = S3Store("bucket", options=S3Options(endpoint_url="https://127.0.0.1:1"))
    assert await _signed_payload(over_tls) == b"UNSIGNED-PAYLOAD"
    in_the_clear = S3Store("bucket", options=S3Options(endpoint_url="http://127.0.0.1:1"))
    assert await _signed_payload(in_the_clear) == signed
    # Also where the endpoint is not ours but the SDK's configuration.
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    assert await _signed_payload(S3Store("bucket")) == signed
