"""One operator's state in a checkpoint of Spark's own, read by Spark's state reader."""

from __future__ import annotations

from dataclasses import dataclass

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import StructType

from dstl.spark.migration.spark_operator import SparkState
from dstl.spark.query.placement import key_group_of
from dstl.spark.saved_state.entries import ENDS, GROUP, KEY, USER_KEY, VALUE, StateFrame
from dstl.state.codec.stored_schema import schema_from_json
from dstl.state.descriptor import StateKind

_STATE_OPTIONS = {
    StateKind.VALUE: {},
    # An array has the elements in their order; a flattened list would have to be trusted to keep it.
    StateKind.LIST: {"flattenCollectionTypes": "false"},
    StateKind.MAP: {"flattenCollectionTypes": "true"},
}


@dataclass(frozen=True, slots=True)
class OperatorReader:
    """Reads the state of one operator as it is after a batch, by Spark's own reader.

    Attributes:
        spark: The session.
        location: The query's checkpoint.
        batch_id: The committed batch.
        number: Spark's operator id.
        max_parallelism: Key groups here.
    """

    spark: SparkSession
    location: str
    batch_id: int
    number: int
    max_parallelism: int

    def __str__(self) -> str:
        return f"operator {self.number} of {self.location}"

    def read(self, what: str, **options: str) -> tuple[DataFrame, StructType]:
        """Return rows of the reader, and their schema, looked at before Spark's parser here sees it.

        Args:
            what: Names the rows, for messages.
            options: The reader's, beside batch and operator.

        Raises:
            CorruptData: The schema holds another type than SQL's own: a user-defined one names a module, to be
                imported.
        """
        reader = self.spark.read.format("statestore").option("batchId", self.batch_id)
        df = reader.option("operatorId", self.number).options(**options).load(self.location)
        return df, schema_from_json(str(df._jdf.schema().json()), f"the schema of {what}")

    def state(self, state: SparkState) -> StateFrame:
        """Return one state."""
        options = {"stateVarName": state.name, **_STATE_OPTIONS[state.kind]}
        df, schema = self.read(f"state {state.name!r} of {self}", **options)
        key, user_key = schema["key"].dataType, None
        columns = self._placed(key)
        if state.kind is StateKind.LIST:
            elements = F.posexplode("list_value").alias(USER_KEY, VALUE)
            df = df.select(*columns, elements)
            columns = [F.col(GROUP), F.col(KEY), F.col(USER_KEY)]
            value = F.col(VALUE)
        elif state.kind is StateKind.MAP:
            user_key = schema["user_map_key"].dataType
            columns.append(F.col("user_map_key").alias(USER_KEY))
            value = F.col("user_map_value")
        else:
            value = F.col("value")
        if state.has_ttl:
            columns += [value.getField("value").alias(VALUE), value.getField("ttlExpirationMs").alias(ENDS)]
        else:
            columns.append(value.alias(VALUE))
        rows = df.select(*columns)
        return StateFrame(rows, key, user_key, rows.schema[VALUE].dataType)

    def timers(self) -> StateFrame:
        """Return the timers."""
        df, schema = self.read(f"the timers of {self}", readRegisteredTimers="true")
        key = schema["key"].dataType
        rows = df.select(*self._placed(key), F.col("expiration_timestamp_ms").alias(USER_KEY))
        return StateFrame(rows, key, None, StructType([]))

    def _placed(self, key: StructType) -> list[Column]:
        group = key_group_of([F.col("key").getField(name) for name in key.names], self.max_parallelism)
        return [group.alias(GROUP), F.col("key").alias(KEY)]
