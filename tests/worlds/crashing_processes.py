"""The processes of a query without Spark: ``python crashing_processes.py driver|worker CONFIG``.

Orders come in and answers go out as lines of JSON.

A driver is the product's coordinator with the TaskManager processes that it launches. A worker runs the product's own
task; what Spark would tell it comes with each order.
"""

import asyncio
import base64
import json
import random
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pyarrow as pa

from dstl.checkpoint.state_catalogue import ExpectedOperator
from dstl.errors import DstlError
from dstl.options import (
    BatchingOptions,
    CheckpointOptions,
    HedgingOptions,
    MaterializationOptions,
    UploadOptions,
)
from dstl.rpc.client import Address
from dstl.rpc.protocol import Secret
from dstl.runtime import system_runtime

OPERATORS = {"left": 2, "right": 1}
MAX_PARALLELISM = 16
KEYS = 24
PADDING = 1500
"""Bytes beside each list of batches, that zstd cannot shorten: a base has several files of 64 KiB."""


def key_of(number: int) -> str:
    return f"key-{number:02d}"


def group_of(key: str) -> int:
    return int(key[4:]) * 7 % MAX_PARALLELISM


def keys_of(batch: int) -> list[str]:
    """The keys that have rows in a batch: every second one in turn, and all of them in each fifth."""
    return [key_of(n) for n in range(KEYS) if batch % 5 == 4 or n % 2 == batch % 2]


def answer(**fields: Any) -> None:
    print(json.dumps(fields), flush=True)


# -- the driver


async def drive(config: dict[str, Any]) -> None:
    from dstl.checkpoint.service import CoordinatorService, CoordinatorSettings, DriverHooks
    from dstl.files.file_log import FileLog
    from dstl.files.namespace import backend_root, plain_location_of
    from dstl.files.options import FileOptions
    from dstl.files.query_directory import QueryDirectory
    from dstl.files.reader import FileReader
    from dstl.process.launch_spec import LaunchSpec
    from dstl.runtime import system_runtime
    from dstl.spark.application.fleet_launcher import FleetLauncher
    from dstl.spark.application.savepoints import SavepointMaker
    from dstl.store import open_store
    from dstl.taskmanager.config import TaskManagerConfig

    location, secret = config["location"], Secret.generate()
    store, launcher = open_store(location), FleetLauncher(config["task_managers"])
    told = TaskManagerConfig(
        location,
        max_parallelism=MAX_PARALLELISM,
        batching=BatchingOptions(inline_threshold=0),
        upload=UploadOptions(),
        # A hedge for every object that is not stored at once.
        hedging=HedgingOptions(cold_delay_s=0.0005, min_delay_s=0.0001, max_delay_s=0.001, target=0.9, budget=1.0),
        materialization=MaterializationOptions(interval_s=0.3, min_pause_s=0.0, file_bytes=1 << 16, min_log_bytes=0),
    )
    loop, runtime = asyncio.get_running_loop(), system_runtime()
    service = CoordinatorService(
        store,
        runtime,
        secret,
        CoordinatorSettings(
            options=CheckpointOptions(
                timeout_s=10.0, retained=2, clean_interval_s=0.5, clean_grace_s=600.0, task_manager_timeout_s=30.0
            ),
            max_parallelism=MAX_PARALLELISM,
            task_managers=config["task_managers"],
            host="127.0.0.1",
            allow_non_restored_state=False,
            task_manager_config=told.to_json(),
        ),
        DriverHooks(
            on_event=lambda report: None,
            on_task_manager_lost=launcher.lost,
        ),
    )
    for uid, parallelism in OPERATORS.items():
        definition = operator(uid, parallelism)
        expected = ExpectedOperator(uid, parallelism, definition.key_types, definition.resolve, None, definition.by)
        service.expect(expected)
    root = backend_root(location)
    plain = open_store(plain_location_of(root))
    # Spark's files ride in the records, though the segments of the tables do not.
    inlines = replace(told, batching=BatchingOptions())
    files = FileLog(inlines, runtime, FileReader(store, plain, runtime))
    directory = QueryDirectory(root, files, service.commits, runtime, FileOptions(**config["files"]))
    address = await service.start()
    launcher.spec = LaunchSpec("", address, secret)
    launcher.start()
    answer(port=address.port, secret=base64.b64encode(secret.reveal()).decode())

    class Loop:
        """The loop that the service runs on, for who makes savepoints on another."""

        submit = staticmethod(lambda work: asyncio.run_coroutine_threadsafe(work, loop))

    maker = SavepointMaker(service, Loop(), location, open_store)  # type: ignore[arg-type]
    while line := await asyncio.to_thread(sys.stdin.readline):
        order = json.loads(line)
        try:
            if order["do"] == "savepoint":
                await directory.settle()
                made = await asyncio.to_thread(maker.make, order["name"], None, None)
                answer(ok=True, batch=made.batch_id)
            elif order["do"] == "plan":
                answer(ok=True, next=await plan(directory, order["run"], order["batch"]))
            elif order["do"] == "commit":
                await directory.put(f"commits/{order['batch']}", order["run"], -1, [b"v1\n{}"])
                answer(ok=True)
            elif order["do"] == "close":
                break
        except DstlError as error:
            answer(ok=False, error=type(error).__name__, why=str(error))
    await directory.settle()
    await service.close()
    await directory.close()
    await asyncio.to_thread(launcher.stop)
    await store.close()
    answer(ok=True)


async def plan(directory: Any, run: str, batch: int) -> int:
    """Look at the checkpoint directory as Spark does, write a batch's offsets, and return the batch to go on with."""
    if await directory.find("metadata", run) is None:
        await directory.put("metadata", "", -1, [b'{"id":"query"}'])
    following = max((int(name) for name, *_ in await directory.listing("commits", run)), default=-1) + 1
    if following == batch and await directory.find(f"offsets/{batch}", run) is None:
        now_ms = int(system_runtime().clock.wall() * 1000)
        header = json.dumps({"batchWatermarkMs": 0, "batchTimestampMs": now_ms, "conf": {}})
        await directory.put(f"offsets/{batch}", run, -1, [b"v1\n%s\n{}" % header.encode()])
    return following


# -- the worker


def operator(uid: str, parallelism: int) -> Any:
    from pyspark.sql import Row
    from pyspark.sql.streaming import StatefulProcessor
    from pyspark.sql.types import LongType, StringType, StructField, StructType

    from dstl.spark.operators.processor import ProcessorDefinition
    from dstl.state.descriptor import DeclaredSchemas
    from dstl.state.processor_runner import ProcessorOperator

    class Append(StatefulProcessor):
        """Keeps the list of the batches that a key had rows in, and yields it."""

        def init(self, handle: Any) -> None:
            value = StructType([StructField("batches", StringType()), StructField("padding", StringType())])
            self.seen = handle.getValueState("seen", value)

        def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
            for row in rows:
                before = self.seen.get()
                batches = f"{before[0]},{row.batch}" if before else str(row.batch)
                noise = random.Random(f"{key[0]}-{row.batch}").randbytes(PADDING).hex()
                self.seen.update((batches, noise))
            yield Row(key=key[0], batches=batches)

        def close(self) -> None:
            pass

    key = StructType([StructField("key", StringType())])
    columns = StructType([*key.fields, StructField("batch", LongType())])
    output = StructType([*key.fields, StructField("batches", StringType())])
    return ProcessorDefinition(
        uid=uid,
        by=("key",),
        parallelism=parallelism,
        max_parallelism=MAX_PARALLELISM,
        processor=Append(),
        operator=ProcessorOperator(name=uid, key_schema=key, input_schema=columns, output_schema=output),
        schemas=DeclaredSchemas(),
    )


class Context:
    """The task context that Spark would have set."""

    def __init__(self, order: dict[str, Any]) -> None:
        self._order = order

    def getLocalProperty(self, name: str) -> str | None:
        order = self._order
        return {
            "streaming.sql.batchId": str(order["batch"]),
            "sql.streaming.queryId": "query",
            "spark.jobGroup.id": order["run"],
        }.get(name)

    def partitionId(self) -> int:
        return int(self._order["slot"])

    def stageId(self) -> int:
        return int(self._order["stage"])

    def taskAttemptId(self) -> int:
        return int(self._order["attempt"])


def work(config: dict[str, Any]) -> None:
    from pyspark import TaskContext

    from dstl.spark.task import OperatorTask
    from dstl.state.keyed_batch import KEY_GROUP_COLUMN
    from handles.key_group import partition_of

    coordinator = Address("127.0.0.1", config["port"])
    secret = Secret(base64.b64decode(config["secret"]))
    schema = pa.schema([("key", pa.string()), ("batch", pa.int64()), (KEY_GROUP_COLUMN, pa.int32())])
    answer(ready=True)
    for line in sys.stdin:
        order = json.loads(line)
        parallelism = OPERATORS[order["operator"]]
        TaskContext._taskContext = Context(order)  # type: ignore[assignment]
        mine = [
            key
            for key in keys_of(order["batch"])
            if partition_of(group_of(key), MAX_PARALLELISM, parallelism) == order["slot"]
        ]
        rows = [{"key": key, "batch": order["batch"], KEY_GROUP_COLUMN: group_of(key)} for key in mine]
        task = OperatorTask(operator(order["operator"], parallelism), coordinator, secret, "127.0.0.1", freezes=False)
        output: dict[str, str] = {}
        try:
            for batch in task(iter([pa.RecordBatch.from_pylist(rows, schema=schema)] if rows else [])):
                for row in batch.to_pylist():
                    output[row["key"]] = row["batches"]
        except DstlError as error:
            answer(ok=False, error=type(error).__name__, why=str(error)[:500])
        else:
            answer(ok=True, output=output)


if __name__ == "__main__":
    threading.current_thread().name = sys.argv[1]
    given = json.loads(sys.argv[2])
    if sys.argv[1] == "driver":
        asyncio.run(drive(given))
    else:
        work(given)
