"""Runs one processor on Spark's own transformWithState and on ours over the same rows; prints what differs as JSON.

A script of its own: it needs a session with settings of its own. Every processor reports all that it sees.
"""

import json
import os
import sys

os.environ["PYSPARK_PYTHON"] = sys.executable

from pyspark.sql import Row, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming.stateful_processor import StatefulProcessor
from pyspark.sql.types import StringType, StructField, StructType

from dstl.spark.operators.arguments import parse_ddl
from dstl.state.descriptor import DeclaredSchemas
from dstl.state.processor_runner import discover_states
from dstl.state.registry import StateRegistry
from dstl.taskmanager.reads import nothing_held

ROWS = [
    "if(id % 5 = 0, null, concat('k', id % 5)) k",
    "if(id % 2 = 0, null, cast(id % 3 as string)) k2",
    "id",
    "cast(id as float) / 3 f",
    "if(id % 3 = 0, null, id % 2 = 0) b",
    "date'2020-01-01' d",
    "cast(id as short) sh",
    "timestamp'2020-11-01 01:30:00' + make_interval(0, 0, 0, 0, cast(id as int)) t",
    "timestamp_ntz'2020-01-01 00:00:00.5' n",
    "named_struct('a', 1, 't', timestamp'2020-01-01 00:00:00') st",
    "map('x', named_struct('y', 2)) m",
    "array(1, null) l",
    "cast(id as decimal(20, 4)) / 3 dec",
    "cast('ab' as binary) bin",
    "interval '1' day dt",
]
OUTPUT = StructType([StructField("k", StringType()), StructField("what", StringType())])


def processor(style, value_json):
    # Inside a function, so that it travels by value and the worker needs no copy of this file.
    class Reports(StatefulProcessor):
        def init(self, handle):
            schema = StructType.fromJson(json.loads(value_json))
            self.names = schema.names
            self.value = handle.getValueState("v", schema)
            self.list = handle.getListState("l", "x int, s struct<a int>")
            self.map = handle.getMapState("m", "a string, t timestamp", "x double, l array<string>")

        def handleInputRows(self, key, rows, timerValues):
            if style == "row":
                found = sorted(rows, key=lambda row: row.id)
                seen = [repr(row) for row in found]
                value = tuple(dict(found[-1].m) if name == "m" else found[-1][name] for name in self.names)
            else:
                import pandas as pd

                frame = pd.concat(list(rows), ignore_index=True).sort_values("id", ignore_index=True)
                seen = [repr(frame.dtypes.to_dict()), repr(frame.to_dict("split"))]
                # Spark itself cannot keep an interval or an array that comes from pandas.
                value = tuple(None if name in ("dt", "l") else frame.iloc[-1][name] for name in self.names)
            self.value.update(value)
            self.list.appendList([(1, Row(a=2)), (None, None)])
            self.list.appendValue((3, Row(a=None)))
            self.map.updateValue(("q", None), (1.5, ["a", None]))
            self.map.updateValue((None, value[self.names.index("t")]), (None, None))
            times = [timerValues.getCurrentProcessingTimeInMs(), timerValues.getCurrentWatermarkInMs()]
            found = self.map.getValue(("q", None))
            states = [repr(self.value.get()), repr(list(self.list.get())), sorted(map(repr, self.map.iterator()))]
            what = json.dumps([*times, repr(key), seen, *states, repr(found), self.map.containsKey(("z", None))])
            out = {"k": repr(key), "what": what}
            if style == "row":
                yield Row(**out)
            else:
                yield pd.DataFrame({name: [one] for name, one in out.items()})

    return Reports()


def main():
    spark = (
        SparkSession.builder.master("local[1]")
        .config("spark.ui.enabled", "false")
        .config("spark.sql.session.timeZone", "America/New_York")
        .config("spark.sql.shuffle.partitions", 1)
        .config(
            "spark.sql.streaming.stateStore.providerClass",
            "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider",
        )
        .getOrCreate()
    )
    rows = spark.range(0, 40).selectExpr(*ROWS)
    inputs = rows.schema.json()
    keys = StructType([rows.schema["k"], rows.schema["k2"]]).json()
    outputs = OUTPUT.json()
    kept = [field for field in rows.schema if field.name not in ("k", "k2")]
    values = StructType([StructField(field.name, field.dataType) for field in kept]).json()
    result = {}
    for style in ("row", "pandas"):
        user = processor(style, values)
        grouped = rows.groupBy("k", "k2")
        run = grouped.transformWithState if style == "row" else grouped.transformWithStateInPandas
        theirs = {row.k: row.what for row in run(user, OUTPUT, "Update", "None").collect()}

        schemas = DeclaredSchemas(parse_ddl)
        discover_states(
            processor(style, values), StateRegistry(StructType([])), "none", "oracle", schemas, nothing_held()
        )

        def task(batches, user=user, style=style, schemas=schemas):
            from dstl.state.processor_runner import ProcessorOperator, ProcessorRunner
            from dstl.state.registry import StateRegistry
            from dstl.state.task_input import TaskInput
            from dstl.taskmanager.reads import nothing_held

            key_schema, input_schema, output_schema = (
                StructType.fromJson(json.loads(text)) for text in (keys, inputs, outputs)
            )
            runner = ProcessorRunner(
                user,
                ProcessorOperator(
                    name="oracle",
                    key_schema=key_schema,
                    input_schema=input_schema,
                    output_schema=output_schema,
                    style=style,
                ),
                StateRegistry(key_schema),
                schemas,
            )
            yield from runner.run(batches, TaskInput(nothing_held(), lambda part: None, 1))

        grouped_rows = rows.withColumn("__dstl_key_group", F.expr("cast(pmod(hash(k, k2), 128) as int)"))
        sorted_rows = grouped_rows.repartition(1).sortWithinPartitions("k", "k2")
        ours = {row.k: row.what for row in sorted_rows.mapInArrow(task, OUTPUT).collect()}
        different = [
            [key, a, b]
            for key in sorted({*theirs, *ours})
            for a, b in zip(json.loads(theirs.get(key, "[1]")), json.loads(ours.get(key, "[2]")), strict=False)
            if a != b
        ]
        result[style] = {"keys": len(theirs), "different": different[:5]}
    spark.stop()
    print(json.dumps(result))


if __name__ == "__main__":
    main()
