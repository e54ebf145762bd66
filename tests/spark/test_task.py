"""A task as a worker runs it, without Spark: how its rows lie, what it asks when, what it keeps for the next one."""

import asyncio
import copy
import json
import os
import pickle
import platform
import random
import subprocess
import sys
from functools import partial

import pyarrow as pa
import pytest
from pyspark import cloudpickle
from pyspark.sql import Row
from pyspark.sql.streaming import StatefulProcessor

from dstl.errors import AccessDenied
from dstl.rpc.client import Address
from dstl.rpc.messages import (
    KEY_COLUMNS,
    VALUE_COLUMN,
    Acknowledgement,
    Assignment,
    Begin,
    Begun,
    Done,
    Fetched,
    TaskAttempt,
    read_columns,
    write_columns,
)
from dstl.rpc.protocol import Secret
from dstl.rpc.server import RpcServer
from dstl.spark import task
from dstl.spark.operators.aggregation import AggregationDefinition
from dstl.spark.operators.grouping import group_rows
from dstl.spark.operators.processor import ProcessorDefinition
from dstl.spark.task import OperatorTask
from dstl.spark.task_attempt import WorkerProcess, run_attempt
from dstl.spark.task_definition import PreparedOperator
from dstl.state.keyed_batch import KEY_GROUP_COLUMN
from dstl.state.processor_runner import ProcessorOperator
from dstl.state.task_input import TaskInput
from dstl.state.vectorised.aggregation import Aggregate
from handles.key_group import KeyGroupRange
from worlds.ddl import parse_ddl, schemas_of_tests
from worlds.echo import Echo, Echoed
from worlds.memory_source import MemorySource
from worlds.runner import plain_aggregation

KEY, ROW = parse_ddl("k long"), parse_ddl("k long, v long")
PLACE = {"uid": "op", "by": ("k",), "parallelism": 1, "max_parallelism": 8}
ROWS = pa.RecordBatch.from_pydict({"k": [1, 2], "v": [3, 4], KEY_GROUP_COLUMN: pa.array([0, 5], pa.int32())})
SERVICE = Address("here", 1)


def counting() -> AggregationDefinition:
    whole = plain_aggregation(KEY, ROW, {"n": Aggregate("count")})
    return AggregationDefinition(**PLACE, operator=whole)


class Remembering(StatefulProcessor):
    """Keeps, against all advice, what it has seen in itself."""

    def __init__(self):
        self.seen = []

    def init(self, handle):
        self.last = handle.getValueState("last", "v long")

    def handleInputRows(self, key, rows, timerValues):
        self.seen += [row.v for row in rows]
        yield Row(k=key[0], v=len(self.seen))


def remembering() -> ProcessorDefinition:
    operator = ProcessorOperator(name="op", key_schema=KEY, input_schema=ROW, output_schema=ROW)
    of = {"processor": Remembering(), "operator": operator, "schemas": schemas_of_tests()}
    return ProcessorDefinition(**PLACE, **of)


class Line:
    """A connection to services that hold no state, and know what was asked in which order."""

    def __init__(self, definition, said):
        self.registry = states_of(definition)
        self.said = said

    def send(self, message):
        self.said.append(type(message).__name__)
        return Answer(self.reply(message), partial(self.said.append, f"answer to {type(message).__name__}"))

    def call(self, message):
        return self.send(message).result()

    def reply(self, message):
        if isinstance(message, Begin):
            owned = Assignment(KeyGroupRange(0, 7), SERVICE)
            return Begun(registry=self.registry, assignments=(owned,))
        if isinstance(message, Acknowledgement):
            return Done()
        if hasattr(message, "keys"):
            keys = read_columns(memoryview(message.keys), KEY_COLUMNS)[1]
            return Fetched(write_columns(VALUE_COLUMN, [pa.nulls(len(keys), pa.binary())]))
        return Done()


class Answer:
    is_done = True

    def __init__(self, reply, taken):
        self.reply, self.taken = reply, taken

    def result(self):
        self.taken()
        return self.reply


def states_of(definition):
    return json.dumps(definition.resolve(None)).encode()


def attempt(definition, rows, said):
    def read():
        for batch in rows:
            said.append("a row is read")
            yield batch

    line = Line(definition, said)
    worker = WorkerProcess(pid=1, host="here", coordinator=SERVICE, connect=lambda address: line, launch=pytest.fail)
    task = TaskAttempt("query", "run", "op", 0, 0, 0, 1)
    return pa.Table.from_batches(run_attempt(PreparedOperator(definition), task, read(), worker))


def test_a_task_begins_before_it_reads_and_waits_for_no_answer_that_it_does_not_need_yet():
    said = []
    assert attempt(counting(), [ROWS], said).to_pydict() == {"k": [1, 2], "n": [1, 1]}
    assert said == [
        "Begin",
        "a row is read",
        "answer to Begin",
        "OpenAttempt",
        "FetchValues",
        "answer to OpenAttempt",
        "answer to FetchValues",
        "Write",
        "answer to Write",
        "Acknowledgement",
        "answer to Acknowledgement",
    ]


def test_a_task_with_many_changes_says_that_they_are_all_and_waits_for_no_further_answer():
    count = 20_000
    groups = pa.array([n * 8 // count for n in range(count)], pa.int32())
    rows = pa.RecordBatch.from_pydict({"k": range(count), "v": range(count), KEY_GROUP_COLUMN: groups})
    said = []
    assert attempt(counting(), [rows], said).num_rows == count
    assert said[said.index("Write") :] == [
        "Write",
        "answer to Write",
        "EndOfChanges",
        "answer to EndOfChanges",
        "Acknowledgement",
        "answer to Acknowledgement",
    ]


def test_a_worker_unpickles_a_task_once():
    one = OperatorTask(counting(), SERVICE, Secret.generate())
    data = cloudpickle.dumps(one)
    first, again = pickle.loads(data), pickle.loads(data)
    assert first is again
    assert first.coordinator == one.coordinator
    assert first.definition.operator.output_schema == one.definition.operator.output_schema
    other = OperatorTask(counting(), Address("there", 2), Secret.generate())
    assert pickle.loads(cloudpickle.dumps(other)).coordinator == Address("there", 2)


async def test_a_reused_worker_calls_no_service_that_has_gone_and_keeps_no_descriptor_of_it(monkeypatch):
    monkeypatch.setattr(task, "_connections", {})

    async def serve(secret, port=0):
        async def echo(peer, call):
            return Echoed(call.n, call.data)

        server = RpcServer(secret, {Echo: echo})
        return server, Address("127.0.0.1", await server.listen_tcp("127.0.0.1", port))

    def call(address, secret):
        connection = task._connection(address, secret)
        return connection, connection.send(Echo(7)).result().n

    def descriptors():
        return len(os.listdir("/proc/self/fd"))

    common = Secret.generate()
    server, address = await serve(common)
    held, _ = await asyncio.to_thread(call, address, common)
    before = descriptors()
    for number in range(100):
        # Each at the port of the one before, with a secret of its own or, as services have, with the same.
        await server.close()
        secret = Secret.generate() if number % 2 else common
        server, address = await serve(secret, address.port)
        held, answer = await asyncio.to_thread(call, address, secret)
        assert answer == 7
        # What unpickles the next task has another object of the same secret.
        assert task._connection(address, pickle.loads(pickle.dumps(secret))) is held
        assert descriptors() <= before + 2
    # While the old one still answers, the other application's task does not speak to it.
    other = Secret.generate()
    with pytest.raises(AccessDenied):
        await asyncio.to_thread(call, address, other)
    await server.close()
    held.close()


def test_a_task_sees_nothing_of_what_another_one_has_left_in_its_processor():
    definition = remembering()
    operator = PreparedOperator(definition)
    for _ in range(3):
        runner = operator.runner(states_of(definition))
        task = TaskInput(MemorySource(), send=lambda part: None, sequence=1)
        made = pa.Table.from_batches(runner.run(iter([ROWS]), task))
        assert made.column("v").to_pylist() == [1, 2]
    assert definition.processor.seen == []


def test_a_run_with_other_states_has_other_runners():
    definition = remembering()
    operator = PreparedOperator(definition)
    known = definition.resolve(None)
    later = copy.deepcopy(known)
    later["next_id"] = 7
    later["states"][0]["id"] = 6
    first, second = (operator.runner(json.dumps(each).encode()) for each in (known, later))
    assert [each.state_id for each in first.registry.descriptors] == [0]
    assert [each.state_id for each in second.registry.descriptors] == [6]


def test_more_text_than_one_array_takes_is_grouped_in_parts(rng: random.Random) -> None:
    """Before, a partition with 2 GiB of text in one column failed with Arrow's own error, at every restart alike."""
    texts = ["x" * (rng.choice([0, 10, 300]) if i != 500 else 9000) for i in range(1000)]
    nested = [{"a": [text, None], "m": [("k", text)]} for text in texts]
    table = pa.table(
        {
            "k": [i * 7 % 31 for i in range(1000)],
            KEY_GROUP_COLUMN: [i * 7 % 31 % 5 for i in range(1000)],
            "text": texts,
            "nested": pa.array(
                nested, pa.struct([("a", pa.list_(pa.string())), ("m", pa.map_(pa.string(), pa.string()))])
            ),
        }
    )
    batches = table.to_batches(max_chunksize=99)
    whole = [row for batch in group_rows(iter(batches), ["k"]) for row in batch.to_pylist()]
    parts = list(group_rows(iter(batches), ["k"], rows_per_batch=64, most_bytes=5000))
    assert [row for batch in parts for row in batch.to_pylist()] == whole
    assert all(batch.nbytes <= 5000 or batch.num_rows == 1 for batch in parts)
    assert max(batch.num_rows for batch in parts) <= 64
    assert {batch.schema for batch in parts} == {table.schema}


def test_keys_come_by_key_group_and_rows_of_a_key_as_they_came(rng: random.Random) -> None:
    keys = [rng.choice([None, *range(40)]) for _ in range(1000)]
    rows = [{"k": k, "i": i, KEY_GROUP_COLUMN: (k or 0) % 7} for i, k in enumerate(keys)]
    batches = pa.Table.from_pylist(rows).to_batches(max_chunksize=99)
    out = [row for batch in group_rows(iter(batches), ["k"], rows_per_batch=64) for row in batch.to_pylist()]
    first = {k: keys.index(k) for k in keys}
    assert out == sorted(rows, key=lambda row: (row[KEY_GROUP_COLUMN], first[row["k"]], row["i"]))


_WORKER = """
import gc, json, weakref
from dstl.spark.worker_process import count_task

class Cycle:
    def __init__(self):
        self.itself = self

seen = []
for task in range(1, 131):
    if task == 100:
        import colorsys
    dropped = weakref.ref(Cycle())
    before = gc.get_freeze_count()
    count_task()
    # The collector has run where it froze, so that garbage of the task is gone rather than kept for ever.
    if gc.get_freeze_count() != before:
        seen.append(task)
        assert dropped() is None, task
print(json.dumps([seen, gc.get_freeze_count(), gc.collect()]))
"""


_BATCHES = """
import resource, sys
from dstl.system_limits import keep_freed_memory

if sys.argv[1] == "kept":
    keep_freed_memory()
for batch in range(20):
    if batch == 10:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    columns = [b"x" * (1 << 20) for _ in range(20)]
    del columns
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another allocator")
def test_a_batch_is_not_paid_for_with_page_faults_of_the_memory_that_the_last_one_freed() -> None:
    faults = {
        way: int(subprocess.run([sys.executable, "-c", _BATCHES, way], capture_output=True, check=True).stdout)
        for way in ("kept", "given back")
    }
    assert faults["kept"] < 0.05 * faults["given back"]


def test_a_worker_freezes_after_its_first_tasks_and_imports_and_never_their_garbage() -> None:
    # Frozen objects of this process would change what other tests see: a process of its own.
    run = subprocess.run([sys.executable, "-c", _WORKER], capture_output=True, text=True, timeout=60, check=True)
    at, frozen, _ = json.loads(run.stdout)
    assert at[0] == 1
    assert set(at) <= {1, 2, 4, 8, 16, 32, 64, 100}
    assert 100 in at
    assert frozen > 1_000
