"""``row``: microseconds of processor time that a key costs a worker in Row style, beside what it costs without us.

Without Spark and sockets: one process runs an operator's runner over Arrow batches as a task of Spark's does. Each key
has one row and a prior state; every series processes all keys once a round, the series in turns. The figures are the
least of the rounds, which is what other processes of a busy machine disturb least.

- ``row``: the processor of ``bench spark`` unchanged: one ``get``, one ``update`` and one ``Row``. ``tuple``: it yields
  a tuple. ``first``: ``row``, no key has prior state. ``get``: it reads its state and its row, and does no more.
- ``generator_floor``: the same loop over a dictionary, rows as ``Row``, nothing encoded. ``loop_floor``: the same work
  on tuples, without a generator. ``row_alone``: making the ``Row``.

With ``--profile`` the functions that take most of ``row``'s time are printed as well.
"""

import argparse
import cProfile
import gc
import pstats
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from pyspark.sql import Row

from bench._figures import add_json, print_figures
from bench.spark import CountAndSum
from dstl.state.codec.value_codec import ValueCodec
from dstl.state.descriptor import DeclaredSchemas
from dstl.state.frames.row_reader import rows_of
from dstl.state.keyed_batch import KEY_GROUP_COLUMN
from dstl.state.processor_runner import ProcessorOperator, ProcessorRunner, discover_states
from dstl.state.registry import StateRegistry
from dstl.state.task_input import TaskInput
from dstl.taskmanager.reads import nothing_held
from dstl.testing import parse_ddl

OPERATOR = ProcessorOperator(
    name="row",
    key_schema=parse_ddl("k long"),
    input_schema=parse_ddl("k long, v long"),
    output_schema=parse_ddl("k long, n long, total long"),
)
KEY_GROUPS = 128


class YieldsTuples(CountAndSum):
    """The same as tuples."""

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Any]:
        n, total = self.seen.get() or (0, 0)
        for row in rows:
            n += 1
            total += row.v
        self.seen.update((n, total))
        yield (key[0], n, total)


class ReadsOnly(CountAndSum):
    """Reads its state and its rows, and does nothing with them."""

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Any]:
        self.seen.get()
        for row in rows:
            row.v  # noqa: B018
        return iter(())


class Prior:
    """Prior state of every key: other bytes for each, found by position as a reply has them."""

    def __init__(self, count: int) -> None:
        encode = ValueCodec("seen", [parse_ddl("n long, total long")]).encode
        self._values = [encode((i % 7, i * 1000)) for i in range(count)]
        self._at = 0

    def fetch_many(self, states: Sequence[int], key_groups: Sequence[int], keys: Sequence[bytes]) -> list[list[Any]]:
        start, self._at = self._at, self._at + len(keys)
        return [self._values[start : self._at] for _ in states]


class Keys:
    """The batches of all series, and how each series goes through them."""

    def __init__(self, count: int, batch: int) -> None:
        self.count, self._batch = count, batch
        numbers = np.arange(count)
        self._columns = {"k": numbers, "v": numbers % 1000}
        groups = np.sort((numbers * 7) % KEY_GROUPS).astype(np.int32)
        whole = pa.record_batch({**self._columns, KEY_GROUP_COLUMN: groups})
        self._batches = [whole.slice(at, batch) for at in range(0, count, batch)]
        self._schemas = DeclaredSchemas(parse_ddl)

    def runner(self, processor: Any) -> ProcessorRunner:
        states = StateRegistry(OPERATOR.key_schema)
        discover_states(processor, OPERATOR, states, self._schemas, nothing_held())
        return ProcessorRunner(processor, OPERATOR, states, self._schemas)

    def run(self, processor: Any, source: Any) -> Callable[[], int]:
        """Return what runs one task over all keys, and returns how many rows it made."""
        runner = self.runner(processor)

        def task() -> int:
            given = TaskInput(source, send=lambda part: None, sequence=1)
            return sum(made.num_rows for made in runner.run(iter(self._batches), given))

        return task

    def generator_floor(self) -> int:
        state: dict[Any, Any] = {}

        def handle(key: Any, rows: Iterator[Row]) -> Iterator[Row]:
            n, total = state.get(key) or (0, 0)
            for row in rows:
                n += 1
                total += row.v
            state[key] = (n, total)
            yield Row(k=key[0], n=n, total=total)

        columns = [column.tolist() for column in self._columns.values()]
        rows, made = rows_of(("k", "v"), columns), []
        for at, key in enumerate(zip(columns[0], strict=True)):
            made += handle(key, iter(rows[at : at + 1]))
        return len(pa.table(list(map(pa.array, zip(*made, strict=True))), names=["k", "n", "total"]))

    def loop_floor(self) -> int:
        state: dict[Any, Any] = {}
        made = []
        for key, value in zip(*(column.tolist() for column in self._columns.values()), strict=True):
            n, total = state.get(key) or (0, 0)
            n += 1
            total += value
            state[key] = (n, total)
            made.append((key, n, total))
        return len(pa.table(list(map(pa.array, zip(*made, strict=True))), names=["k", "n", "total"]))

    def row_alone(self) -> int:
        for i in range(self.count):
            Row(k=i, n=i, total=i)
        return self.count


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Run every series ``rounds`` times in turns, and return the least of each in microseconds a key."""
    keys = Keys(args.keys, args.batch)
    series: dict[str, Callable[[], Callable[[], int]]] = {
        "row": lambda: keys.run(CountAndSum(), Prior(args.keys)),
        "tuple": lambda: keys.run(YieldsTuples(), Prior(args.keys)),
        "first": lambda: keys.run(CountAndSum(), nothing_held()),
        "get": lambda: keys.run(ReadsOnly(), Prior(args.keys)),
        "generator_floor": lambda: keys.generator_floor,
        "loop_floor": lambda: keys.loop_floor,
        "row_alone": lambda: keys.row_alone,
    }
    least: dict[str, float] = {}
    for _ in range(args.rounds):
        for name, make in series.items():
            task = make()
            gc.collect()
            # The runner has the collector look less often; the floors go without.
            (gc.enable if task.__name__ == "task" else gc.disable)()
            before = time.process_time()
            made = task()
            spent = (time.process_time() - before) / args.keys * 1e6
            gc.enable()
            if made != (0 if name == "get" else args.keys):
                raise SystemExit(f"{name} made {made} rows of {args.keys} keys")
            least[name] = min(spent, least.get(name, spent))
    if args.profile:
        with cProfile.Profile() as profile:
            series["row"]()()
        pstats.Stats(profile, stream=sys.stderr).sort_stats("tottime").print_stats(20)
    return {"keys": args.keys, "us_per_key": {name: round(us, 3) for name, us in least.items()}}


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench row", description=__doc__)
    parser.add_argument("--keys", type=int, default=100_000, help="of one task")
    parser.add_argument("--batch", type=int, default=10_000, help="rows of an Arrow batch")
    parser.add_argument("--rounds", type=int, default=5, help="the least of so many (default 5)")
    parser.add_argument("--profile", action="store_true", help="print where the time of ``row`` goes")
    add_json(parser)
    args = parser.parse_args(argv)
    print_figures(run(args), as_json=args.json)
    return 0
