"""Visits of pages from Kafka, numbered, and appended to a Delta table once: ``python job.py SERVERS DIRECTORY``.

Kill it at any moment and start it again: of each page the table has 1, 2, 3, ... once.
``tests/spark/test_connectors.py`` does so with what is here.
"""

import sys
from pathlib import Path

import kafka_source
from deltalake import CommitProperties, DeltaTable, Transaction, write_deltalake
from pyspark import cloudpickle
from pyspark.sql import Row, SparkSession
from pyspark.sql.streaming import StatefulProcessor

from dstl.spark import StateBackend, batch_stamp

cloudpickle.register_pickle_by_value(kafka_source)  # Spark's processes for a source know no module beside this one


class Visits(StatefulProcessor):
    def init(self, handle):
        self.n = handle.getValueState("n", "n long")

    def handleInputRows(self, key, rows, timerValues):
        (n,) = self.n.get() or (0,)
        for _ in rows:
            n += 1
            yield Row(page=key[0], n=n)
        self.n.update((n,))


def append_once(table, rows, stamp, name="visits"):
    """Append the rows of a batch, if the table does not have that batch."""
    if DeltaTable.is_deltatable(table) and DeltaTable(table).transaction_version(name) == stamp:
        return
    properties = CommitProperties(app_transactions=[Transaction(name, stamp)])
    write_deltalake(table, rows, mode="append", commit_properties=properties)


def visits(spark, backend, servers, most=50):
    """Return the stream of numbered visits, at most ``most`` offsets of each partition a batch."""
    spark.dataSource.register(kafka_source.KafkaSource)
    options = {"servers": servers, "topic": "visits", "maxOffsetsPerTrigger": str(most)}
    clicks = spark.readStream.format("kafka-python").options(**options).load()
    clicks = clicks.selectExpr("value as page")
    return backend.groupBy(clicks, "page").transformWithState(
        Visits(), "page string, n long", "append", "none", name="visits"
    )


def main(servers, directory):
    spark = SparkSession.builder.getOrCreate()
    table = str(Path(directory, "visits"))

    def write(batch, number):
        append_once(table, batch.toArrow(), batch_stamp(batch))

    with StateBackend(str(Path(directory, "state"))) as backend:
        writer = visits(spark, backend, servers).writeStream.outputMode("append").foreachBatch(write)
        writer = writer.option("checkpointLocation", backend.checkpoint_location)
        writer.trigger(processingTime="1 second").start().awaitTermination()


if __name__ == "__main__":
    main(*sys.argv[1:])
