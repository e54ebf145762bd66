"""``async``: duration of a micro-batch on ``dstl://`` by when its commit becomes durable.

A batch writes its offsets, works ``--work-ms``, at whose end each partition puts its changes, and writes its commit,
as Spark does; the next one begins ``--gap-ms`` later, which is Spark's own time between two batches and counts for
none. The real directory, log, uploader with its hedges and manifest log run in virtual time over the latency model:
only the store's time counts, neither Spark's nor that of calls. ``now``, ``with_next``: ``spark.dstl.commit``.
``with_next_keep``: with ``spark.dstl.sources=keep`` besides, so that a batch begins while its offsets are being stored.
``none``: no checkpoint at all, the work alone. Times in ms.
"""

import argparse
import asyncio
import random
import sys
from collections.abc import Mapping, Sequence

import numpy as np

from bench._figures import add_json, print_figures
from bench._models import models
from dstl.files.config import FileConfig
from dstl.files.file_log import FileLog
from dstl.files.leader import own_directory
from dstl.files.options import FileOptions
from dstl.files.reader import FileReader
from dstl.store.memory import MemoryStore
from dstl.taskmanager.config import TaskManagerConfig
from tests.simulation.latency import LatencyModel, LatencyParameters, LatencyStore
from tests.simulation.virtual_time import LoopClock, run_in_virtual_time, seeded_runtime

ARMS = {
    "now": FileOptions(),
    "with_next": FileOptions(commit="with-next"),
    "with_next_keep": FileOptions(commit="with-next", sources="keep"),
    "none": None,
}
RUN = "run"
KEPT = 100
"""Batches that a query keeps, as Spark does by default."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark from the command line."""
    parser = argparse.ArgumentParser(prog="python -m bench async", description=__doc__)
    parser.add_argument("--model", default="s3-standard-small", help="a name of bench/models.json")
    parser.add_argument("--batches", type=int, default=500, help="that are measured")
    parser.add_argument("--warm-up", type=int, default=100, help="batches before those: hedging learns")
    parser.add_argument("--work-ms", type=float, default=500.0)
    parser.add_argument("--gap-ms", type=float, default=10.0)
    parser.add_argument("--partitions", type=int, default=16)
    parser.add_argument("--bytes", type=int, default=8000, help="of a partition's changes")
    parser.add_argument("--seed", type=int, default=1)
    add_json(parser)
    args = parser.parse_args(argv)
    result: dict[str, Mapping[str, float]] = {}
    for name, options in ARMS.items():
        result[name] = run_in_virtual_time(_run(args, options))
        print(f"{name}: {result[name]}", file=sys.stderr, flush=True)
    print_figures(result, as_json=args.json)
    return 0


async def _run(args: argparse.Namespace, options: FileOptions | None) -> dict[str, float]:
    loop, rng = asyncio.get_running_loop(), random.Random(args.seed)
    query = None if options is None else _Query(args, options)
    took = []
    before = 0
    for batch in range(args.warm_up + args.batches):
        if query is not None and batch == args.warm_up:
            before = query.requests
        begin = loop.time()
        if query is not None:
            await query.put(f"offsets/{batch}", b"v1\n{}")
        await asyncio.sleep(args.work_ms / 1000)
        if query is not None:
            changes = [
                (f"state/0/{p}/{batch + 1}.changelog", rng.randbytes(args.bytes)) for p in range(args.partitions)
            ]
            await asyncio.gather(*(query.put(path, content) for path, content in changes))
            await query.put(f"commits/{batch}", b'v1\n{"nextBatchWatermarkMs":0}')
        if batch >= args.warm_up:
            took.append((loop.time() - begin) * 1000)
        await asyncio.sleep(args.gap_ms / 1000)
        if query is not None and batch >= KEPT:
            await query.forget(batch - KEPT, args.partitions)
    requests = 0.0
    if query is not None:
        requests = (query.requests - before) / args.batches
        await query.close()
    figures = {"p50": np.percentile(took, 50), "p99": np.percentile(took, 99), "requests_per_batch": requests}
    return {name: round(float(value), 2) for name, value in figures.items()}


class _Query:
    """A checkpoint directory over the latency model."""

    def __init__(self, args: argparse.Namespace, options: FileOptions) -> None:
        period_s = (args.work_ms + args.gap_ms) / 1000
        model = LatencyModel(LatencyParameters.of(models()[args.model]), args.seed, load=2 / period_s)
        inner = MemoryStore()
        self._stores = (LatencyStore(inner, model), LatencyStore(inner, model))
        runtime = seeded_runtime(args.seed, LoopClock())
        config = TaskManagerConfig(location="")
        log = FileLog(config, runtime, FileReader(self._stores[0], MemoryStore(), runtime), self._stores[1])
        self._directory = own_directory("dstl:///bench/query", log, {}, runtime, FileConfig("", files=options))

    @property
    def requests(self) -> int:
        return sum(store.requests for store in self._stores)

    async def put(self, path: str, content: bytes) -> None:
        await self._directory.put(path, RUN, -1, [content])

    async def forget(self, batch: int, partitions: int) -> None:
        for path in (
            f"offsets/{batch}",
            f"commits/{batch}",
            *(f"state/0/{p}/{batch + 1}.changelog" for p in range(partitions)),
        ):
            await self._directory.delete(path, RUN)

    async def close(self) -> None:
        await self._directory.close()
