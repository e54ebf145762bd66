"""A source for Spark in Python, over confluent-kafka: where Spark's own, a jar, cannot be had, as in our tests.

In production take Spark's: ``spark.readStream.format("kafka")`` with ``spark-sql-kafka``; the columns are the same.
Options: ``servers``, ``topic``, and ``maxOffsetsPerTrigger`` for each partition.
"""

import time
from dataclasses import dataclass
from datetime import UTC, datetime

import confluent_kafka
from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition


@dataclass
class Stretch(InputPartition):
    partition: int
    start: int
    end: int


class KafkaSource(DataSource):
    @classmethod
    def name(cls):
        return "kafka-python"

    def schema(self):
        return "key string, value string, partition int, offset long, timestamp timestamp"

    def streamReader(self, schema):
        return KafkaReader(self.options)


class KafkaReader(DataSourceStreamReader):
    def __init__(self, options):
        self.servers, self.topic = options["servers"], options["topic"]
        self.most = int(options.get("maxOffsetsPerTrigger", 1 << 62))

    def initialOffset(self):
        return {str(p): low for p, (low, _) in self._bounds().items()}

    def latestOffset(self, start=None, limit=None):
        """Return where a batch ends: this is what Spark keeps, and what a batch that runs again is read by."""
        ends = {str(p): high for p, (_, high) in self._bounds().items()}
        if start is None:  # Spark before 4.2 tells none
            return ends
        return {p: min(high, start.get(p, 0) + self.most) for p, high in ends.items()}

    def partitions(self, start, end):
        return [Stretch(int(p), start.get(p, 0), stop) for p, stop in end.items() if stop > start.get(p, 0)]

    def read(self, stretch):
        consumer = self._consumer()
        consumer.assign([confluent_kafka.TopicPartition(self.topic, stretch.partition, stretch.start)])
        at, ends = stretch.start, time.monotonic() + 60
        while at < stretch.end:
            message = consumer.poll(1)
            if message is None or message.error():
                if time.monotonic() > ends:
                    raise TimeoutError(f"{self.topic}-{stretch.partition} answered nothing at offset {at}")
                continue
            if message.offset() != at:  # retention has deleted what the batch needs: failing beats losing rows
                raise LookupError(f"{self.topic}-{stretch.partition}: offset {at} is gone, {message.offset()} came")
            made = datetime.fromtimestamp(message.timestamp()[1] / 1000, UTC)
            key, value = (None if each is None else each.decode() for each in (message.key(), message.value()))
            yield key, value, stretch.partition, at, made
            at += 1
        consumer.close()

    def _bounds(self):
        consumer = self._consumer()
        try:
            found = consumer.list_topics(self.topic, timeout=10).topics[self.topic].partitions
            return {
                p: consumer.get_watermark_offsets(confluent_kafka.TopicPartition(self.topic, p), timeout=10)
                for p in found
            }
        finally:
            consumer.close()

    def _consumer(self):
        # Spark's checkpoint has the offsets: nothing is committed to Kafka, and the group's name says nothing.
        return confluent_kafka.Consumer(
            {
                "bootstrap.servers": self.servers,
                "group.id": "dstl",
                "enable.auto.commit": False,
                "auto.offset.reset": "error",
                "log_level": 2,
            }
        )
