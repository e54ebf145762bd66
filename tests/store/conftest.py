"""One S3 server for all tests here, and a bucket for each."""

from collections.abc import Iterator
from itertools import count

import pytest

from dstl.options import S3Options
from worlds.s3_server import S3Server

_buckets = count()


@pytest.fixture
def s3_server(moto_server: S3Server) -> Iterator[S3Server]:
    moto_server.faults.clear()
    moto_server.fired.clear()
    moto_server.log.clear()
    moto_server.requests.clear()
    moto_server.latency_s = 0.0
    with moto_server.credentials():
        yield moto_server


@pytest.fixture
def s3_bucket(s3_server: S3Server) -> str:
    name = f"bucket-{next(_buckets)}"
    s3_server.make_bucket(name)
    s3_server.requests.clear()
    s3_server.log.clear()
    return name


@pytest.fixture
def s3_options(s3_server: S3Server) -> S3Options:
    # The smallest sizes that S3 allows, so that the contract's large object goes up in parts.
    return S3Options(
        endpoint_url=s3_server.endpoint_url,
        multipart_threshold=5 << 20,
        multipart_part_size=5 << 20,
        read_timeout_s=10.0,
    )
