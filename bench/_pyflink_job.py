"""One job of PyFlink's, for ``bench peers``: a program of its own, run by a Python that has apache-flink and not DSTL.

It counts and adds up by key what CSV files hold, with a ``KeyedProcessFunction`` over one value state, and prints the
milliseconds that the job has run, as Flink says them.
"""

import argparse
import sys
import sysconfig

from pyflink.common import Configuration, Row, Types
from pyflink.common.typeinfo import RowTypeInfo
from pyflink.datastream import KeyedProcessFunction, RuntimeContext, StreamExecutionEnvironment
from pyflink.datastream.state import ValueStateDescriptor
from pyflink.table import StreamTableEnvironment

COLUMNS = RowTypeInfo([Types.LONG(), Types.LONG(), Types.LONG()], ["k", "n", "total"])


class CountAndSum(KeyedProcessFunction):
    """One read and one write of one value state for each event."""

    def open(self, runtime_context: RuntimeContext) -> None:
        kind = Types.TUPLE([Types.LONG(), Types.LONG()])
        self.seen = runtime_context.get_state(ValueStateDescriptor("seen", kind))

    def process_element(self, value, ctx):  # type: ignore[no-untyped-def]
        n, total = self.seen.value() or (0, 0)
        n, total = n + 1, total + value[1]
        self.seen.update((n, total))
        yield Row(value[0], n, total)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("input")
    parser.add_argument("checkpoints")
    parser.add_argument("--mode", choices=("process", "thread"), required=True)
    parser.add_argument("--parallelism", type=int, required=True)
    parser.add_argument("--interval-ms", type=int, required=True)
    args = parser.parse_args()
    options = Configuration()
    options.set_string("python.execution-mode", args.mode)
    options.set_string("python.executable", sys.executable)
    options.set_string("python.client.executable", sys.executable)
    # In thread mode the JVM starts an interpreter that knows nothing of a virtual environment.
    options.set_string("python.pythonpath", sysconfig.get_paths()["purelib"])
    options.set_string("execution.checkpointing.interval", f"{args.interval_ms} ms")
    options.set_string("execution.checkpointing.dir", f"file://{args.checkpoints}")
    options.set_string("restart-strategy.type", "none")
    options.set_string("taskmanager.memory.managed.size", "512m")
    env = StreamExecutionEnvironment.get_execution_environment(options)
    env.set_parallelism(args.parallelism)
    tables = StreamTableEnvironment.create(env)
    tables.execute_sql(
        f"CREATE TABLE events (k BIGINT, v BIGINT) WITH ('connector' = 'filesystem', 'path' = 'file://{args.input}', "
        "'format' = 'csv')"
    )
    tables.execute_sql("CREATE TABLE nothing (k BIGINT, n BIGINT, total BIGINT) WITH ('connector' = 'blackhole')")
    events = tables.to_data_stream(tables.from_path("events"))
    counted = events.key_by(lambda row: row[0], key_type=Types.LONG()).process(CountAndSum(), output_type=COLUMNS)
    result = tables.from_data_stream(counted).execute_insert("nothing")
    result.wait()
    print(result.get_job_client().get_job_execution_result().result().get_net_runtime())


if __name__ == "__main__":
    main()
