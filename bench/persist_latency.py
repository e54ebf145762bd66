"""The FLIP's experiment: how long a checkpoint of many writers waits for the store, with and without batching.

500 writers with 5 MB each (FLIP-158, "Proposed changes", performance of the DSTL writer) spread over TaskManagers; all
persist at once, in virtual time over the latency model. The real writers, encoder and uploader run; only the store's
time counts. Arms: ``unbatched`` (an object per writer, which waits for its own alone), ``batched`` (the TaskManager's
segments: a writer waits for all of them), and ``batched_hedged``. ``--bytes 2000`` shows small writers, where batching
saves most requests. ``--json`` prints one object on the last line of stdout; times in ms.
"""

import argparse
import asyncio
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa

from bench._figures import add_json, print_figures
from bench._hedging_run import SizeStore
from bench._models import models
from dstl.changelog.change_set import CHANGE_SCHEMA, OP_PUT
from dstl.changelog.writer import StateChangelogWriter
from dstl.options import BatchingOptions, HedgingOptions
from dstl.taskmanager.config import TaskManagerConfig
from dstl.taskmanager.task_manager import Changelog, Components
from tests.simulation.latency import LatencyModel, LatencyParameters, LatencyStore
from tests.simulation.virtual_time import run_in_virtual_time, seeded_runtime

ROUND_S = 30.0
_HUGE = 1 << 40


@dataclass
class Arm:
    """One way to persist, and what was measured of it."""

    name: str
    batched: bool
    hedged: bool
    writer_ms: list[float] = field(default_factory=list)
    checkpoint_ms: list[float] = field(default_factory=list)
    requests: int = 0
    bytes_sent: float = 0.0

    def report(self, rounds: int) -> dict[str, float]:
        """Return percentiles over writers, over checkpoints, and what each checkpoint cost."""
        at = {"p50": 50.0, "p75": 75.0, "p99": 99.0, "p999": 99.9}
        found = {name: round(float(np.percentile(self.writer_ms, q)), 1) for name, q in at.items()}
        return found | {
            "checkpoint_p50": round(float(np.percentile(self.checkpoint_ms, 50)), 1),
            "checkpoint_max": round(max(self.checkpoint_ms), 1),
            "requests": round(self.requests / rounds, 1),
            "megabytes": round(self.bytes_sent / rounds / 1e6, 1),
        }


@dataclass
class Manager:
    """One TaskManager: its log and its writers."""

    changelog: Changelog
    stores: tuple[LatencyStore, LatencyStore]
    writers: list[StateChangelogWriter]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark from the command line."""
    args = _parser().parse_args(argv)
    parameters = LatencyParameters.of(models()[args.model])
    began = time.monotonic()
    result: dict[str, object] = {
        "model": args.model,
        "writers": args.writers,
        "bytes": args.bytes,
        "per_manager": args.per_manager,
        "checkpoints": args.rounds,
    }
    for arm in (
        Arm("unbatched", batched=False, hedged=False),
        Arm("batched", batched=True, hedged=False),
        Arm("batched_hedged", batched=True, hedged=True),
    ):
        run_in_virtual_time(_run(args, parameters, arm))
        result[arm.name] = arm.report(args.rounds)
        print(f"{arm.name}: {time.monotonic() - began:.0f} s: {result[arm.name]}", file=sys.stderr, flush=True)
    result["wall_s"] = round(time.monotonic() - began, 1)
    print_figures(result, as_json=args.json)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench persist_latency", description=__doc__)
    parser.add_argument("--model", default="flip158-5mb", help="a name of bench/models.json")
    parser.add_argument("--writers", type=int, default=500)
    parser.add_argument("--bytes", type=int, default=5_000_000, help="of each writer's changes")
    parser.add_argument("--per-manager", type=int, default=10, help="writers of one TaskManager")
    parser.add_argument("--rounds", type=int, default=3, help="checkpoints that are measured")
    parser.add_argument("--warm-up", type=int, default=3, help="checkpoints before those: hedging learns")
    parser.add_argument("--segment-size", type=int, default=BatchingOptions().segment_size, help="of the batched arms")
    parser.add_argument("--seed", type=int, default=1)
    add_json(parser)
    return parser


async def _run(args: argparse.Namespace, parameters: LatencyParameters, arm: Arm) -> None:
    model = LatencyModel(parameters, args.seed, load=args.writers / ROUND_S)
    managers = [_manager(args, arm, model, first) for first in range(0, args.writers, args.per_manager)]
    stores = [store for manager in managers for store in manager.stores]
    changes = _changes(args.bytes, args.seed)
    loop = asyncio.get_running_loop()
    for number in range(-args.warm_up, args.rounds):
        begin = loop.time()
        if number == 0:
            arm.requests -= sum(store.requests for store in stores)
            arm.bytes_sent -= sum(store.bytes_sent for store in stores)
        took = await asyncio.gather(*(_checkpoint(manager, changes, arm) for manager in managers))
        if number >= 0:
            arm.writer_ms += [ms for each in took for ms in each]
            arm.checkpoint_ms.append(max(ms for each in took for ms in each))
        await asyncio.sleep(max(0.0, begin + ROUND_S - loop.time()))
    arm.requests += sum(store.requests for store in stores)
    arm.bytes_sent += sum(store.bytes_sent for store in stores)
    for manager in managers:
        await manager.changelog.close()


def _manager(args: argparse.Namespace, arm: Arm, model: LatencyModel, first: int) -> Manager:
    seed = args.seed * 1000 + first
    runtime = seeded_runtime(seed)
    stores = (LatencyStore(SizeStore(), model), LatencyStore(SizeStore(), model))
    config = TaskManagerConfig(
        stores[0].location,
        batching=BatchingOptions(
            segment_size=args.segment_size if arm.batched else 1,
            preemptive_persist_threshold=_HUGE,
            byte_budget=_HUGE,
            inline_threshold=0,
        ),
        hedging=HedgingOptions(enabled=arm.hedged),
    )
    changelog = Changelog(config, Components(store=stores[0], hedge_store=stores[1], runtime=runtime), "bench")
    writers = range(min(args.per_manager, args.writers - first))
    return Manager(changelog, stores, [changelog.storage.create_writer(f"log-{n}") for n in writers])


async def _checkpoint(manager: Manager, changes: pa.RecordBatch, arm: Arm) -> list[float]:
    """Persist every writer at once, and return how long each waited, in ms."""
    loop = asyncio.get_running_loop()
    begin = loop.time()

    async def persist(writers: Sequence[StateChangelogWriter]) -> list[float]:
        starts = [writer.next_sequence_number() for writer in writers]
        for writer in writers:
            writer.append_batch(changes)
        result = await manager.changelog.storage.persist_all(list(zip(writers, starts, strict=True)))
        took = (loop.time() - begin) * 1e3
        manager.changelog.storage.confirm(result)
        for writer in writers:
            writer.truncate(result.ranges[writer.log_id].to_sqn)
        return [took] * len(writers)

    asking = [manager.writers] if arm.batched else [[writer] for writer in manager.writers]
    return [ms for took in await asyncio.gather(*map(persist, asking)) for ms in took]


def _changes(nbytes: int, seed: int) -> pa.RecordBatch:
    """Changes of incompressible values of 1,000 bytes in 128 key groups, as one batch that all writers share."""
    count = max(1, nbytes // 1000)
    width = nbytes // count
    rng = np.random.default_rng(seed)
    body = pa.py_buffer(rng.bytes(count * width))
    offsets = pa.py_buffer(np.arange(0, count * width + 1, width, dtype=np.int32))
    empty = pa.array([b""] * count, pa.binary())
    columns = [
        pa.array((np.arange(count) * 128 // count).astype(np.uint16)),
        pa.array(np.zeros(count, np.uint16)),
        pa.array(np.full(count, OP_PUT, np.uint8)),
        empty,
        empty,
        pa.Array.from_buffers(pa.binary(), count, [None, offsets, body]),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=CHANGE_SCHEMA)
