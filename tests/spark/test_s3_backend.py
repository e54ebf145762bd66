"""State on S3 through Spark, and S3's refusals before any query runs."""

import os
from collections.abc import Iterator

import pytest
from home import Home
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from dstl.errors import AccessDenied, Invalid, Unavailable
from dstl.options import BatchingOptions, S3Options
from dstl.spark import StateBackend, transform_savepoint
from worlds.s3_place import S3Place
from worlds.s3_server import S3Server


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with S3Server() as server, server.credentials():
        server.make_bucket("bucket")
        yield server


@pytest.mark.s3server
@pytest.mark.filterwarnings("ignore:datetime.datetime.utcnow:DeprecationWarning")
def test_a_query_keeps_its_state_on_s3_and_goes_on_from_it_and_from_a_changed_savepoint(
    home: Home, s3_place: S3Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = home.stream()
    for batch in range(2):
        source.add([{"k": f"k{i % 5}", "v": i} for i in range(20)])
        with StateBackend(
            f"{s3_place.location}/jobs/count",
            parallelism=2,
            s3=s3_place.options(),
            batching=BatchingOptions(inline_threshold=0),
            spark=home.spark,
        ) as backend:
            source.drain(backend.groupBy(source.read(), "k").agg(F.count("*").alias("n"), name="counts"), backend)
            saved = backend.savepoint(f"batch-{batch}").location
        assert set(source.output("k string, n long")) >= {(f"k{i}", 4 * (batch + 1)) for i in range(5)}
    assert saved == f"{s3_place.location}/jobs/count/savepoints/batch-1"
    # Its tasks read S3 in Spark's workers, which have the environment with which the session was started.
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_DEFAULT_REGION"):
        if name in os.environ:
            monkeypatch.setitem(home.spark.sparkContext.environment, name, os.environ[name])
    changed = transform_savepoint(
        saved,
        f"{s3_place.location}/jobs/other/savepoints/without-k0",
        {"counts": {"aggregates": lambda rows: rows.where("key.k != 'k0'")}},
        max_parallelism=32,
        s3=s3_place.options(),
        spark=home.spark,
    )
    source = home.stream()
    source.add([{"k": f"k{i}", "v": i} for i in range(5)])
    with StateBackend(
        f"{s3_place.location}/jobs/other",
        parallelism=3,
        max_parallelism=32,
        restore_from=changed.location,
        s3=s3_place.options(),
        spark=home.spark,
    ) as backend:
        source.drain(backend.groupBy(source.read(), "k").agg(F.count("*").alias("n"), name="counts"), backend)
    assert source.output("k string, n long") == [("k0", 1), *((f"k{i}", 9) for i in range(1, 5))]


class TestRefused:
    """Before the query starts, with the location and what to do, and without a secret."""

    @pytest.fixture(autouse=True)
    def no_faults(self, server: S3Server) -> None:
        server.faults.clear()

    def refused(self, spark: SparkSession, location: str, endpoint: str) -> str:
        with pytest.raises((AccessDenied, Invalid, Unavailable)) as raised:
            StateBackend(location, s3=S3Options(endpoint_url=endpoint), spark=spark)
        text = str(raised.value)
        assert location in text
        assert "testing" not in text.replace(location, "")
        return text

    def test_a_missing_bucket(self, spark: SparkSession, server: S3Server) -> None:
        assert "bucket" in self.refused(spark, "s3://nowhere/job", server.endpoint_url)

    def test_credentials_that_may_not(self, spark: SparkSession, server: S3Server) -> None:
        server.fail("error", method="PUT", status=403, code="AccessDenied", times=99)
        self.refused(spark, "s3://bucket/job", server.endpoint_url)

    def test_an_endpoint_where_nobody_answers(self, home: Home) -> None:
        self.refused(home.spark, "s3://bucket/job", "http://127.0.0.1:9")
