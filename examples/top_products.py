"""The three best sellers of each shop, from a map state: product to units sold.

Run it: ``python examples/top_products.py``
"""

import heapq
import json
import tempfile
from collections import Counter
from pathlib import Path

from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql.streaming import StatefulProcessor

from dstl.spark import StateBackend

SALES = [
    [("north", "tea", 3), ("north", "jam", 5), ("north", "salt", 1), ("south", "tea", 2)],
    [("north", "oil", 4), ("north", "tea", 3), ("south", "jam", 1)],
]


class TopProducts(StatefulProcessor):
    """Yields a shop's best sellers whenever the shop has sold something."""

    def init(self, handle):
        self.sold = handle.getMapState("sold", "product string", "units long")

    def handleInputRows(self, key, rows, timerValues):
        new = Counter()
        for row in rows:
            new[row.product] += row.units
        for product, units in new.items():
            before = self.sold.getValue((product,)) or (0,)
            self.sold.updateValue((product,), (before[0] + units,))
        best = heapq.nlargest(3, self.sold.iterator(), key=lambda entry: entry[1][0])
        yield Row(shop=key[0], best=", ".join(f"{product} {units}" for (product,), (units,) in best))

    def close(self):
        pass


def top_products(backend: StateBackend, sales: DataFrame) -> DataFrame:
    return backend.groupBy(sales, "shop").transformWithState(
        TopProducts(), "shop string, best string", "update", "none"
    )


def main(spark: SparkSession, work: Path) -> list[tuple]:
    (work / "sales").mkdir(parents=True)
    for number, batch in enumerate(SALES):
        lines = [json.dumps({"shop": shop, "product": product, "units": units}) for shop, product, units in batch]
        (work / "sales" / f"{number}.json").write_text("\n".join(lines))
    sales = spark.readStream.schema("shop string, product string, units long").option("maxFilesPerTrigger", 1)
    latest: dict[str, str] = {}
    with StateBackend(str(work / "state"), spark=spark) as backend:
        best = top_products(backend, sales.json(str(work / "sales")))
        query = (
            best.writeStream.outputMode("update")
            .foreachBatch(lambda df, _: latest.update((row.shop, row.best) for row in df.collect()))
            .option("checkpointLocation", backend.checkpoint_location)
            .trigger(availableNow=True)
            .start()
        )
        query.awaitTermination()
    return sorted(latest.items())


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        for shop, best in main(SparkSession.builder.getOrCreate(), Path(directory)):
            print(f"{shop}: {best}")
