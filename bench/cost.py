"""``cost``: dollars of checkpoints in S3, by trigger and partitions, and of a measured job: ours against Spark's own.

``month_usd`` is computed: requests of a batch, times batches, times price, storage and bases left out. By way:

- ``dstl_now``: offsets and commit, a record each, at any number of partitions. ``dstl_with_next``: one record holds
  both, where the next batch begins within 50 ms; where it does not, it costs as much as ``dstl_now``.
- ``spark_one_put``: Spark at its best: one PUT for each file, that is for each partition and store, and for its own
  offsets and commit, and no other request.
- ``spark_renames``: a committer that renames: each file as the log of an S3 server had it for Spark with S3A of
  Hadoop 3.3 (4 and 16 partitions: 2 PUT or COPY, 5 HEAD, 8 GET or LIST, 1 DELETE). S3A asks for a status by HEAD and
  LIST, and reads no bytes of what it writes, so the 8 are LISTs, which cost as much as PUTs. Spark's snapshots and
  cleaning are left out.

``job`` is measured: the requests of one TaskManager and the coordinator over ``--batches`` batches, bases included, and
what the last checkpoint refers to; the record of offsets, which Spark asks for, is added. The log is materialized by
its size alone. Prices: ``dstl/monitoring/cost.py``.
"""

import argparse
import asyncio
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench._figures import print_figures
from bench._state_job import add_job_arguments, in_directory, keys_of, local_job
from dstl.monitoring.cost import Cost, cost_of_day
from dstl.options import MaterializationOptions
from tests.worlds.demand import demand

DAY_S = 86_400.0
MONTH_DAYS = 30
TRIGGERS_S = (1, 10, 60)
PARTITIONS = (4, 64)


@dataclass(frozen=True, slots=True)
class Way:
    """How the checkpoint of a batch comes into S3.

    Attributes:
        puts: Requests at the price of a PUT (COPY and LIST too), of a file, or of a batch where there are no files.
        gets: Those at the price of a GET (HEAD too).
        files: Of a batch beside those of its partitions and stores; None: their number does not matter.
    """

    puts: int
    gets: int = 0
    files: int | None = None

    def requests(self, partitions: int, stores: int = 1) -> tuple[int, int]:
        """Return PUTs and GETs of a batch."""
        count = 1 if self.files is None else partitions * stores + self.files
        return self.puts * count, self.gets * count


WAYS: Mapping[str, Way] = {
    "dstl_now": Way(2),
    "dstl_with_next": Way(1),
    # Beside its stores' files: offsets and commits.
    "spark_one_put": Way(1, files=2),
    "spark_renames": Way(2 + 8, 5, files=2),
}


def month_usd(way: Way, trigger_s: float, partitions: int, stores: int = 1) -> float:
    """Return what a month's requests cost."""
    puts, gets = way.requests(partitions, stores)
    return _requests_of_day(puts, gets, trigger_s).requests * MONTH_DAYS


def months(triggers_s: Sequence[float], partitions: Sequence[int], stores: int = 1) -> dict[str, Any]:
    """Return a month's dollars by way, partitions and trigger."""
    return {
        name: {
            f"{count}_partitions": {f"each_{s:g}s": round(month_usd(way, s, count, stores), 2) for s in triggers_s}
            for count in partitions
        }
        for name, way in WAYS.items()
    }


def _requests_of_day(puts: float, gets: float, trigger_s: float, stored: float = 0) -> Cost:
    batches = DAY_S / trigger_s
    return cost_of_day(puts * batches, stored, gets=gets * batches)


async def measure(args: argparse.Namespace, directory: Path) -> dict[str, Any]:
    """Run the job's batches, and count."""
    keys = keys_of(args, args.state_mb)
    async with local_job(args, directory, MaterializationOptions(min_pause_s=0, interval_s=1e9)) as job:
        await job.load(keys)
        demand(job.manager)
        await job.settled()
        before = job.store.calls.copy()
        for _ in range(args.batches):
            await job.batch(job.rng.integers(0, keys, args.changed_keys))
            await job.settled()
        spent = job.store.calls - before
        assert job.newest is not None
        stored = job.newest.full_bytes
    puts = (spent["put"] + spent["list"]) / args.batches
    gets = (spent["get"] + spent["head"]) / args.batches
    found = {
        # The job has no Spark, and so no record of offsets.
        "dstl_now": (puts + WAYS["dstl_now"].puts - WAYS["dstl_with_next"].puts, gets, stored),
        "dstl_with_next": (puts, gets, stored),
        **{
            name: (*WAYS[name].requests(args.partitions, args.stores), 0) for name in ("spark_one_put", "spark_renames")
        },
    }
    job_figures: dict[str, Any] = {
        "job": f"{args.partitions} partitions, {args.stores} stores, a batch each {args.trigger_s:g} s that changes "
        f"{args.changed_keys:,} keys of {keys:,} with {args.value_bytes} bytes each",
        "stored_mb": stored / 1e6,
    }
    ours = 0.0
    for name, (puts, gets, held) in found.items():
        cost = _requests_of_day(puts, gets, args.trigger_s, held)
        ours = ours or cost.total
        print(f"{name}: {cost.formula}", file=sys.stderr)
        job_figures[name] = {
            "usd_a_day": cost.total,
            "requests_usd": cost.requests,
            "puts_a_batch": puts,
            "gets_a_batch": gets,
            "ratio_to_dstl_now": cost.total / ours,
        }
    return job_figures


def main(argv: list[str]) -> int:
    """Run the benchmark from the command line."""
    parser = argparse.ArgumentParser(prog="python -m bench cost", description=__doc__)
    parser.add_argument("--partitions", type=int, default=200, help="of the job: Spark's default; ours do not count")
    parser.add_argument("--stores", type=int, default=1, help="state stores of each of Spark's partitions")
    parser.add_argument("--trigger-s", type=float, default=10.0, help="of the job: from one batch to the next")
    parser.add_argument("--state-mb", type=float, default=100.0, help="keys and values, MB of 1e6 bytes")
    parser.add_argument("--changed-keys", type=int, default=10_000, help="of one batch")
    parser.add_argument("--batches", type=int, default=60, help="measured ones")
    add_job_arguments(parser, value_bytes=100)
    args = parser.parse_args(argv)
    counts = sorted({*PARTITIONS, args.partitions})
    figures = {
        "month_usd": months(sorted({*TRIGGERS_S, args.trigger_s}), counts, args.stores),
        "job": in_directory(lambda directory: asyncio.run(measure(args, directory)), args.directory),
    }
    print_figures(figures, as_json=args.json)
    return 0
