"""``requests``: requests of a checkpoint against the number of partitions, beside the files that Spark's store writes.

The same count per key through ``backend.groupBy().agg()`` and through Spark's ``groupBy().count()`` with RocksDB and
its changelog. Of DSTL the requests to the store are counted, as its reports have them; of Spark the files below
``state/`` of its checkpoint directory, each of which is at least one PUT (and a copy more for its rename, which S3 has
not). The first batch, which makes tables, is left out; medians of the others.
"""

import argparse
import statistics
import sys
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from bench._figures import add_json, print_figures
from bench._stream import session
from bench.spark import write_input
from dstl.spark import StateBackend
from dstl.spark.listener import CheckpointReport, Report


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Run both at every number of partitions."""
    rows = []
    with session("requests", argparse.Namespace(slots=args.slots, partitions=1, work=None)) as (spark, work):
        given = write_input(work / "in", args.keys * (args.batches + 1), args.keys, args.batches + 1, "long", 1)
        for partitions in args.partitions:
            spark.conf.set("spark.sql.shuffle.partitions", str(partitions))
            place = work / f"{partitions}"
            place.mkdir()
            reports: list[CheckpointReport] = []

            def on_report(report: Report, into: list[CheckpointReport] = reports) -> None:
                if isinstance(report, CheckpointReport):
                    into.append(report)

            with StateBackend(place / "state", parallelism=partitions, spark=spark) as backend:
                backend.add_listener(on_report)
                counted = backend.groupBy(_read(spark, given.directory), "k").agg(
                    F.count("*").alias("n"), name="counts"
                )
                _run(counted, backend.checkpoint_location)
            _run(_read(spark, given.directory).groupBy("k").count(), str(place / "spark"))
            files = _files_by_batch(place / "spark" / "state")
            row = {
                "partitions": partitions,
                "dstl_requests": statistics.median(report.requests for report in reports[1:]),
                "spark_files": statistics.median(files[1:]),
            }
            print(row, file=sys.stderr)
            rows.append(row)
    return {"rows": rows, "keys": args.keys, "batches": args.batches}


def _read(spark: SparkSession, directory: Path) -> DataFrame:
    reader = spark.readStream.schema("k long, v long").option("maxFilesPerTrigger", 1)
    return reader.parquet(str(directory))


def _run(df: DataFrame, checkpoint: str) -> None:
    writer = df.writeStream.outputMode("update").format("noop").option("checkpointLocation", checkpoint)
    writer.trigger(availableNow=True).start().awaitTermination()


def _files_by_batch(state: Path) -> list[int]:
    """Return how many files of each version, which is a batch's number and one more, Spark's store has written."""
    found: dict[int, int] = {}
    for path in state.rglob("*"):
        version = path.name.partition(".")[0].partition("_")[0]
        if path.is_file() and not path.name.startswith(".") and version.isdigit():
            found[int(version)] = found.get(int(version), 0) + 1
    return [found[version] for version in sorted(found)]


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench requests", description=__doc__)
    parser.add_argument("--partitions", type=int, nargs="+", default=[1, 4, 16, 64, 128])
    parser.add_argument("--keys", type=int, default=10_000, help="and events of each batch")
    parser.add_argument("--batches", type=int, default=3, help="measured ones")
    parser.add_argument("--slots", type=int, default=2, help="tasks at once")
    add_json(parser)
    args = parser.parse_args(argv)
    print_figures(measure(args), as_json=args.json)
    return 0
