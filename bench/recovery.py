"""``recovery``: how long restoring a state takes, against reading its bytes and against a restore without a changelog.

A state of ``--state-mb`` is logged, materialized, and then a share of it is changed again in small batches, so that the
checkpoint is a base and log after it. Measured, medians of the rounds, in one process over a local directory (its bytes
are in the page cache for all of them alike) or over the same directory behind a latency model:

``restore_s``               the checkpoint into an empty table, all key groups
``raw_read_s``              the same bytes read one object after the other and decompressed, nothing else; a table's own
                            files, which nobody decompresses, are read and written to a directory instead. Says little
                            behind a latency model, where a restore asks for several objects at once
``no_changelog_restore_s``  a checkpoint of the same final state that is all base and no log

``cpu`` has the processor seconds of the same three, of all threads: comparable on a busy machine too.

With ``--first-batch``, by megabytes of state, behind modelled reads of S3: seconds from the start of a TaskManager
until it can be used (``open_s``), until a batch of ``--lookups`` keys is answered (``first_batch_s``), with the
requests until then (``requests``), and until all is loaded (``all_loaded_s``). With ``--task-managers 4`` one of four
is lost and takes its share again, as each does when the parallelism is changed.
"""

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import zstandard

from bench._figures import print_figures
from bench._first_batch import measure as measure_first_batch
from bench._state_job import (
    GROUPS,
    KEY_BYTES,
    OPERATOR,
    StateJob,
    add_job_arguments,
    add_store_arguments,
    in_directory,
    open_store,
    store_name,
)
from dstl.changelog.segment.index import CODEC_ZSTD
from dstl.changelog.segment.reader import parse_index
from dstl.checkpoint.assembly import recovery_work
from dstl.options import MaterializationOptions
from dstl.store.base import ObjectStore
from handles.checkpoint import CompletedCheckpoint
from handles.key_group import KeyGroupRange
from handles.materialized_handle import KeyGroupBase, generations_of
from materializer.bases.key_group_index import KeyGroupIndex, read_index
from materializer.restore.log_replay import replay_steps
from tests.worlds.demand import demand
from tests.worlds.restored import restore_tables

ALL = KeyGroupRange.all(GROUPS)
QUIET = MaterializationOptions(interval_s=1e9, min_pause_s=0, log_to_state_ratio=None, replay_s=None, max_segments=None)


async def materialize_now(job: StateJob) -> None:
    """Materialize everything, and have a checkpoint name it."""
    await job.batch(np.arange(0))
    demand(job.manager)
    await job.settled()
    await job.batch(np.arange(0))


async def restore(job: StateJob, store: ObjectStore, checkpoint: CompletedCheckpoint) -> tuple[float, int]:
    """Seconds, and entries that came."""
    started = time.perf_counter()
    restored = await restore_tables(checkpoint, store, ALL, job.open_table, job.runtime, on_progress=lambda _: None)
    seconds = time.perf_counter() - started
    size = restored.tables[OPERATOR].size()
    restored.tables[OPERATOR].close()
    return seconds, size.entries


async def raw_read(checkpoint: CompletedCheckpoint, store: ObjectStore, near: Path) -> float:
    """Seconds to read and decompress what a restore reads, one object after the other, without any check."""
    generations = generations_of(checkpoint.materialized)
    newest = {op: {group: bases[0].checkpoint for group, bases in of.items()} for op, of in generations.items()}
    parts: dict[str, list[KeyGroupBase]] = {}
    files: set[str] = set()
    for of in generations.values():
        for bases in of.values():
            files.update(file.name for file in bases[0].file.files)
            if not bases[0].file.files:
                parts.setdefault(bases[0].file.name, []).append(bases[0])
    segments = [step.entry.handle for step in replay_steps(checkpoint, ALL, newest)]
    decompressor = zstandard.ZstdDecompressor()
    with tempfile.TemporaryDirectory(dir=near) as copies:
        started = time.perf_counter()
        for at, name in enumerate(files):
            copy(copies, str(at), await store.get(name))
        for name, held in parts.items():
            data = memoryview(await store.get(name))
            for part in held:
                for frames, size in base_frames(data[part.offset : part.offset + part.length], part.key_group):
                    with decompressor.stream_reader(frames, read_across_frames=True) as reader:
                        reader.readinto(bytearray(size))
        for handle in segments:
            data = memoryview(await store.get(handle.name))[handle.offset : handle.offset + handle.size]
            for log in parse_index(bytes(data), handle.name).logs:
                for entry in log.blocks:
                    if entry.codec == CODEC_ZSTD:
                        stored = data[entry.offset : entry.offset + entry.length]
                        decompressor.decompress(stored, max_output_size=entry.raw_length)
        return time.perf_counter() - started


def copy(directory: str, name: str, data: bytes) -> None:
    """Write a file as a restore must."""
    Path(directory, name).write_bytes(data)


def base_frames(part: memoryview, key_group: int) -> Iterator[tuple[memoryview, int]]:
    """The zstd frames of one key group in a base file, those of a block's values together, and their sizes unpacked."""
    index = read_index(part, len(part), key_group, name="a base")
    assert isinstance(index, KeyGroupIndex)
    for start, block in zip(index.starts, index.blocks, strict=False):
        end = start + block.stored_head
        yield part[start:end], block.head
        yield part[end : end + block.stored_values], block.values


async def measure(args: argparse.Namespace, directory: Path) -> dict[str, Any]:
    keys = max(GROUPS, int(args.state_mb * 1e6) // (args.value_bytes + KEY_BYTES))
    job = StateJob(
        open_store("local", directory, "", args.seed),
        directory,
        table=args.table,
        options=QUIET,
        value_bytes=args.value_bytes,
        seed=args.seed,
        retained=1 << 20,  # all are restored at the end
    )
    # Written without the model: loading through it would only take time.
    store = open_store(args.store, directory, args.model, args.seed)
    try:
        await job.begin()
        await job.load(keys)
        await materialize_now(job)
        await materialize_now(job)
        print(f"{keys:,} keys materialized", file=sys.stderr)
        changed = int(keys * args.log_share)
        batch_keys = max(1, int(args.batch_mb * 1e6) // (args.value_bytes + KEY_BYTES))
        for start in range(0, changed, batch_keys):
            await job.batch(job.rng.integers(0, keys, min(batch_keys, changed - start)))
        assert job.newest is not None
        with_log = job.newest
        work = recovery_work(with_log)
        await materialize_now(job)
        await materialize_now(job)
        without_log = job.newest
        if recovery_work(without_log).segments:
            raise SystemExit("the checkpoint without a changelog has log")
        figures: dict[str, list[float]] = {"restore_s": [], "raw_read_s": [], "no_changelog_restore_s": []}
        cpu: dict[str, list[float]] = {name: [] for name in figures}
        for _ in range(args.rounds):
            # In turns, so that whatever else the machine does meets all of them.
            for name, checkpoint in (("restore_s", with_log), ("no_changelog_restore_s", without_log)):
                before = time.process_time()
                seconds, entries = await restore(job, store, checkpoint)
                cpu[name].append(time.process_time() - before)
                figures[name].append(seconds)
                if entries != keys and args.table == "heap":
                    raise SystemExit(f"{entries} of {keys} keys came back")
            before = time.process_time()
            figures["raw_read_s"].append(await raw_read(with_log, store, directory))
            cpu["raw_read_s"].append(time.process_time() - before)
    finally:
        await store.close()
        await job.close()
    medians = {name: statistics.median(each) for name, each in figures.items()}
    return {
        "state_mb": args.state_mb,
        "log_mb": work.log_bytes / 1e6,
        "base_mb": work.base_bytes / 1e6,
        "segments": work.segments,
        **medians,
        "ratio_to_raw": medians["restore_s"] / medians["raw_read_s"],
        "ratio_to_no_changelog": medians["restore_s"] / medians["no_changelog_restore_s"],
        "cpu": {name: statistics.median(each) for name, each in cpu.items()},
        "table": args.table,
        "value_bytes": args.value_bytes,
        "store": store_name(args),
    }


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench recovery", description=__doc__)
    parser.add_argument(
        "--state-mb",
        type=float,
        nargs="+",
        default=[100.0],
        help="keys and values, MB of 1e6 bytes; several are for --first-batch",
    )
    parser.add_argument("--first-batch", action="store_true", help="how soon a started TaskManager answers a batch")
    parser.add_argument("--lookups", type=int, default=20_000, help="keys of that batch")
    parser.add_argument(
        "--task-managers", type=int, default=1, help="of so many, each with a share of the state, one is started"
    )
    parser.add_argument("--log-mb", type=float, default=10.0, help="log behind its bases")
    parser.add_argument(
        "--log-share",
        type=float,
        default=0.1,
        help="log after the base, by state; the trigger allows 0.2",
    )
    parser.add_argument("--batch-mb", type=float, default=10.0, help="what a batch of that log changes")
    parser.add_argument("--rounds", type=int, default=30, help="the first ones of a process are slower, unevenly so")
    add_store_arguments(parser, store="local")
    add_job_arguments(parser, value_bytes=1000)
    args = parser.parse_args(argv)
    if args.first_batch:
        figures = in_directory(lambda directory: measure_first_batch(args, directory), args.directory)
    elif len(args.state_mb) > 1:
        parser.error("several sizes are for --first-batch")
    else:
        args.state_mb = args.state_mb[0]
        figures = in_directory(lambda directory: asyncio.run(measure(args, directory)), args.directory)
    print_figures(figures, as_json=args.json)
    return 0
