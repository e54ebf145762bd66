"""Spark's own operators, their checkpoint directory in DSTL's log: two requests a batch, whatever the partitions.

Run it: ``python examples/own_operators.py``
"""

import json
import tempfile
from pathlib import Path

from pyspark.sql import SparkSession

from dstl.spark import jar_path


def main(spark: SparkSession, work: Path) -> list[tuple]:
    (work / "clicks").mkdir(parents=True)
    found: dict[str, int] = {}
    for number, pages in enumerate((["home", "shop", "home"], ["home"])):
        (work / "clicks" / f"{number}.json").write_text("\n".join(json.dumps({"page": page}) for page in pages))
        counts = spark.readStream.schema("page string").json(str(work / "clicks")).groupBy("page").count()
        writer = counts.writeStream.outputMode("update").trigger(availableNow=True)
        writer = writer.foreachBatch(lambda batch, _: found.update(map(tuple, batch.collect())))
        writer.option("checkpointLocation", f"dstl://{work}/counts").start().awaitTermination()
    return sorted(found.items())


if __name__ == "__main__":
    builder = SparkSession.builder.config("spark.jars", jar_path()).config("spark.plugins", "dstl.spark.DstlPlugin")
    with tempfile.TemporaryDirectory() as directory:
        print(main(builder.getOrCreate(), Path(directory)))
