"""An archive of Spark's classes for the JVMs of tests, which map it instead of reading and verifying each class.

``python -m worlds.class_archive FILE`` makes one of what a small query loads.
"""

import fcntl
import os
import subprocess
import sys
import tempfile
from pathlib import Path

STORE = "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"


def shared_classes(archive: Path) -> str:
    """Return options for JVMs that share an archive.

    A JVM that cannot use it, as one with other jars or before it is made, starts as ever and does not speak of it.
    """
    return f"-XX:SharedArchiveFile={archive} -Xlog:disable -Xlog:all=error:stderr"


def begin_to_make(archive: Path) -> subprocess.Popen[bytes] | None:
    """Start a process that makes an archive, where there is none and no other process makes it."""
    archive.parent.mkdir(parents=True, exist_ok=True)
    with archive.with_suffix(".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return None
        if archive.exists():
            return None
        command = [sys.executable, "-m", "worlds.class_archive", str(archive)]
        env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
        # It has the lock until it ends.
        quiet = subprocess.DEVNULL
        return subprocess.Popen(command, env=env, stdout=quiet, stderr=quiet, pass_fds=(lock.fileno(),))


def make(archive: Path) -> None:
    """Run a query of Spark's own, with all that it loads, and let its JVM write the archive at its end."""
    from pyspark.sql import SparkSession
    from pyspark.sql import functions as F

    made = archive.with_suffix(f".{os.getpid()}")
    os.environ["JDK_JAVA_OPTIONS"] = (
        f"-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -XX:ArchiveClassesAtExit={made} -Xlog:disable"
    )
    with tempfile.TemporaryDirectory() as directory:
        builder = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false")
        for name in ("host", "bindAddress"):
            builder = builder.config(f"spark.driver.{name}", "127.0.0.1")
        builder = builder.config("spark.sql.shuffle.partitions", "1").config("spark.local.dir", directory)
        spark = builder.config("spark.sql.streaming.stateStore.providerClass", STORE).getOrCreate()
        rows = [f'{{"k": {number % 3}, "t": "2026-01-01"}}' for number in range(9)]
        Path(directory, "in").mkdir()
        Path(directory, "in", "0.json").write_text("\n".join(rows))
        source = spark.readStream.schema("k long, t timestamp").json(f"{directory}/in").withWatermark("t", "1 second")
        counted = (
            source.mapInArrow(lambda batches: batches, "k long, t timestamp")
            .groupBy("k", F.window("t", "1 minute"))
            .count()
        )
        writer = counted.writeStream.outputMode("update").foreachBatch(lambda out, _: out.collect())
        writer.option("checkpointLocation", f"{directory}/state").trigger(availableNow=True).start().awaitTermination()
        spark.read.format("statestore").load(f"{directory}/state").collect()
        gateway = spark.sparkContext._gateway
        spark.stop()
        gateway.shutdown()  # type: ignore[union-attr]
        gateway.proc.stdin.close()  # type: ignore[union-attr]
        gateway.proc.wait()  # type: ignore[union-attr]
    made.rename(archive)


if __name__ == "__main__":
    make(Path(sys.argv[1]))
