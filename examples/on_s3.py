"""State in S3: a restart with another parallelism, and a savepoint that a second location goes on from.

The server is moto's, in this process; for a real one leave it out and set ``endpoint_url`` or nothing.

Run it: ``python examples/on_s3.py``
"""

import json
import os
import tempfile
from pathlib import Path

import boto3
from moto.server import ThreadedMotoServer
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from dstl.options import S3Options
from dstl.spark import StateBackend


def run(spark: SparkSession, work: Path, location: str, endpoint: str, parallelism: int, **more: str) -> list[tuple]:
    """Count what is there, from where the location's last run has stopped; return what has changed."""
    found: list[tuple] = []
    s3 = S3Options(endpoint_url=endpoint)
    with StateBackend(location, parallelism=parallelism, s3=s3, spark=spark, **more) as backend:
        clicks = spark.readStream.schema("page string").json(str(work / "clicks"))
        counts = backend.groupBy(clicks, "page").agg(F.count("*").alias("n"), name="counts")
        writer = counts.writeStream.outputMode("update").trigger(availableNow=True)
        writer = writer.foreachBatch(lambda batch, number: found.extend(map(tuple, batch.collect())))
        writer.option("checkpointLocation", backend.checkpoint_location).start().awaitTermination()
        if not more:
            backend.savepoint(f"with-{parallelism}")
    return sorted(found)


def click(work: Path, number: int, pages: list[str]) -> None:
    (work / "clicks").mkdir(parents=True, exist_ok=True)
    (work / "clicks" / f"{number}.json").write_text("\n".join(json.dumps({"page": page}) for page in pages))


def main(spark: SparkSession, work: Path) -> list[list[tuple]]:
    names = {"AWS_ACCESS_KEY_ID": "any", "AWS_SECRET_ACCESS_KEY": "any", "AWS_DEFAULT_REGION": "us-east-1"}
    before = {name: os.environ.get(name) for name in names}
    os.environ.update(names)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    host, port = server.get_host_and_port()
    endpoint = f"http://{host}:{port}"
    try:
        boto3.client("s3", endpoint_url=endpoint).create_bucket(Bucket="bucket")
        click(work, 1, ["home", "shop", "home"])
        first = run(spark, work, "s3://bucket/jobs/counts", endpoint, 2)
        click(work, 2, ["home"])
        second = run(spark, work, "s3://bucket/jobs/counts", endpoint, 5)
        # The savepoint is of the first run. Without a copy of Spark's directory the sources are read from their start.
        savepoint = "s3://bucket/jobs/counts/savepoints/with-2"
        third = run(spark, work, "s3://bucket/jobs/again", endpoint, 1, restore_from=savepoint)
        return [first, second, third]
    finally:
        server.stop()
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        print(*main(SparkSession.builder.getOrCreate(), Path(directory)), sep="\n")
