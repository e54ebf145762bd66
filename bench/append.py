"""``append``: what it costs to log a million changes and to read them back.

Appends column batches in record order and persists them into a local directory through the real writer, storage and
uploader; then reads all key groups, and one (the median of five), through the real reader. Medians of the rounds.
A record is a value and a key group, without a key; ``--key-bytes 8`` adds distinct ones.

``--flink DIR`` runs Flink's own log on the same records, round by round in turn, and adds ``flink_append_persist_s``,
``flink_replay_s`` (its defaults, which upload while the records are appended) and the same with ``_at_once``
(everything is written at the persist, as here).
"""

import argparse
import asyncio
import json
import random
import shutil
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack, aclosing
from pathlib import Path

import numpy as np
import pyarrow as pa

from bench._figures import add_json, print_figures
from bench._flink_append import FlinkAppend
from bench._state_job import fixed_width
from dstl.changelog.change_set import CHANGE_SCHEMA, OP_PUT
from dstl.changelog.segment.reader import SegmentReader
from dstl.options import BatchingOptions
from dstl.runtime import system_runtime
from dstl.store.local import LocalStore
from dstl.taskmanager.config import TaskManagerConfig
from dstl.taskmanager.task_manager import Changelog, Components
from handles.key_group import KeyGroupRange
from handles.segment_handle import SegmentHandle

DISTINCT = 1024


def values(width: int, seed: int) -> list[bytes]:
    """1,024 distinct values: the first half of each random bytes, the second half zero."""
    rng = random.Random(seed)
    half = width - width // 2
    return [rng.randbytes(half) + bytes(width - half) for _ in range(DISTINCT)]


def batches(args: argparse.Namespace, distinct: list[bytes]) -> list[pa.RecordBatch]:
    """All records as column batches, in record order."""
    rows = np.frombuffer(b"".join(distinct), np.uint8).reshape(DISTINCT, args.value_bytes)
    found = []
    for start in range(0, args.records, args.batch_records):
        i = np.arange(start, min(args.records, start + args.batch_records))
        keys = i.astype(">i8").view(np.uint8).reshape(-1, 8)[:, 8 - args.key_bytes :]
        columns = [
            pa.array((31 * i % args.key_groups).astype(np.uint16)),
            pa.array(np.zeros(len(i), np.uint16)),
            pa.array(np.full(len(i), OP_PUT, np.uint8)),
            fixed_width(keys),
            fixed_width(np.empty((len(i), 0), np.uint8)),
            fixed_width(rows[i % DISTINCT]),
        ]
        found.append(pa.RecordBatch.from_arrays(columns, schema=CHANGE_SCHEMA))
    return found


async def persist(
    args: argparse.Namespace, data: list[pa.RecordBatch], store: LocalStore
) -> tuple[float, list[SegmentHandle]]:
    """Append and persist once; seconds, and where it lies."""
    config = TaskManagerConfig(store.location, batching=BatchingOptions(compression_level=args.compression_level))
    changelog = Changelog(config, Components(store=store, runtime=system_runtime()), "bench")
    try:
        writer = changelog.storage.create_writer("log-0")
        started = time.perf_counter()
        for batch in data:
            writer.append_batch(batch)
        result = await changelog.storage.persist_all([(writer, 0)], allow_inline=False)
        segments = result.segments[writer.log_id]
        return time.perf_counter() - started, [s.location for s in segments if isinstance(s.location, SegmentHandle)]
    finally:
        await changelog.close()


async def replay(store: LocalStore, handles: list[SegmentHandle], wanted: KeyGroupRange | None) -> tuple[float, int]:
    """Read segments into columns; seconds, and how many changes came."""
    count = 0
    started = time.perf_counter()
    for handle in handles:
        async with aclosing(SegmentReader(store, handle).read(wanted)) as found:
            async for _, batch, _ in found:
                count += batch.num_rows
    return time.perf_counter() - started, count


async def check(
    store: LocalStore, handles: list[SegmentHandle], args: argparse.Namespace, distinct: list[bytes]
) -> None:
    """Compare everything that is stored with what was appended, group by group in record order."""
    for group in {0, 31 % args.key_groups, args.key_groups - 1}:
        found: list[bytes] = []
        for handle in handles:
            async for _, batch, _ in SegmentReader(store, handle).read(KeyGroupRange(group, group)):
                found += batch.column(5).to_pylist()
        expected = [distinct[i % DISTINCT] for i in range(args.records) if 31 * i % args.key_groups == group]
        if found != expected:
            raise SystemExit(f"key group {group} came back different")


async def run(args: argparse.Namespace) -> dict[str, float]:
    distinct = values(args.value_bytes, args.seed)
    data = batches(args, distinct)
    figures: dict[str, list[float]] = {}
    with ExitStack() as peers:
        flink = {
            suffix: peers.enter_context(
                FlinkAppend(args.flink, args.records, args.value_bytes, args.key_groups, ahead=not suffix)
            )
            for suffix in (("", "_at_once") if args.flink else ())
        }
        for number in range(args.rounds):
            directory = tempfile.mkdtemp(prefix="dstl-bench-append-")
            try:
                store = LocalStore(directory)
                seconds, handles = await persist(args, data, store)
                all_s, count = await replay(store, handles, None)
                if count != args.records:
                    raise SystemExit(f"{count} of {args.records} records came back")
                ones = [KeyGroupRange(group, group) for group in range(min(5, args.key_groups))]
                one_s = statistics.median([(await replay(store, handles, one))[0] for one in ones])
                if number == 0:
                    await check(store, handles, args, distinct)
            finally:
                shutil.rmtree(directory, ignore_errors=True)
            result = {
                "append_persist_s": seconds,
                "replay_s": all_s,
                "replay_one_group_s": one_s,
                "file_bytes": float(sum(handle.size for handle in handles)),
            }
            for suffix, peer in flink.items():
                result.update({f"flink_{name}{suffix}": value for name, value in peer.round().items()})
            print(f"round {number + 1}: {json.dumps(result)}", file=sys.stderr)
            for name, value in result.items():
                figures.setdefault(name, []).append(value)
    medians = {name: statistics.median(each) for name, each in figures.items()}
    return {**medians, "file_bytes": int(medians["file_bytes"])}


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench append", description=__doc__)
    parser.add_argument("--records", type=int, default=1_000_000)
    parser.add_argument("--value-bytes", type=int, default=100)
    parser.add_argument("--key-groups", type=int, default=128)
    parser.add_argument("--key-bytes", type=int, default=0, choices=range(9), help="distinct keys as well (default 0)")
    parser.add_argument("--batch-records", type=int, default=65_536, help="records of one column batch")
    parser.add_argument("--compression-level", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--flink", type=Path, help="directory of Flink's jars, to run it as well")
    add_json(parser)
    args = parser.parse_args(argv)
    figures = asyncio.run(run(args))
    print_figures(figures, as_json=args.json)
    return 0
