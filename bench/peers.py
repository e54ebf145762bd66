"""``peers``: events per second of PyFlink's keyed process function, and of a Row-style processor, over the same events.

The same counts and keys on both sides, in one run. ``dstl_processor`` is that of ``bench spark``: one read and one
write of a value state for each key of a micro-batch. ``pyflink_process`` and ``pyflink_thread`` are the execution modes
of a ``KeyedProcessFunction`` over Flink's heap, one read and one write for each event, with a checkpoint every
``--interval-ms`` into a directory. ``--pyflink`` is a Python that has apache-flink: an environment of its own, for its
pins are not PySpark's.

A job of PyFlink's runs over the first file, and then over all: rates are of the difference, in the milliseconds that
Flink says, so that starting it does not count. Ours leaves out the first batch. ``cpu`` has seconds of processor for a
million events: of all processes of ours as in ``bench spark``, of PyFlink's JVM (``jvm``) and Pythons (``others``).
"""

import argparse
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow.csv as pc
import pyarrow.parquet as pq

from bench import spark as bench_spark
from bench._figures import print_figures
from bench._processor_time import processor_ms
from bench._stream import add_stream_arguments, session

_JOB = Path(__file__).with_name("_pyflink_job.py")
_LOOK_S = 0.2
MODES = ("process", "thread")


def run_job(args: argparse.Namespace, mode: str, source: Path, place: Path) -> tuple[int, Counter[str]]:
    """Run one job of PyFlink's; returns its milliseconds, and those of processor by kind of process."""
    words = [args.pyflink, _JOB, source, place, "--mode", mode, "--parallelism", args.slots]
    before = spent = processor_ms()
    with (
        (place.parent / f"{place.name}.log").open("w+") as said,
        subprocess.Popen(
            [*map(str, words), "--interval-ms", str(args.interval_ms)], stdout=subprocess.PIPE, stderr=said, text=True
        ) as job,
    ):
        until = time.monotonic() + args.timeout_s
        while job.poll() is None:
            if time.monotonic() > until:
                job.kill()
            # While its processes are there: nobody waits for all of them.
            spent = processor_ms()
            time.sleep(_LOOK_S)
        assert job.stdout is not None
        printed = job.stdout.read().split()
        if job.returncode or not printed:
            said.seek(0)
            raise SystemExit(f"the job of PyFlink's in {mode} mode ended with {job.returncode}:\n{said.read()[-2000:]}")
    spent.subtract(before)
    return int(printed[-1]), spent


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Run both sides, ours first, and return their rates and processor time."""
    figures: dict[str, Any] = {"events": args.events, "keys": args.keys, "interval_ms": args.interval_ms}
    cpu: dict[str, dict[str, float]] = {}
    with session("peers", args) as (spark, work):
        data = bench_spark.write_input(work / "input", args.events, args.keys, args.batches, "long", args.seed)
        files = sorted(data.directory.glob("*.parquet"))
        for name, chosen in (("first", files[:1]), ("all", files)):
            (work / name).mkdir()
            for path in chosen:
                made = work / name / f"{path.stem}.csv"
                pc.write_csv(pq.read_table(path), made, pc.WriteOptions(include_header=False))
        ours = bench_spark.Runs(args, spark, work)
        figures["dstl_processor"] = round(ours.measure("dstl_processor", data))
        millions = data.events * (1 + 1 / args.batches) / 1e6
        cpu["dstl_processor"] = {kind: round(ms / 1e3 / millions, 3) for kind, ms in ours.spent.items() if ms > 0}
        for mode in MODES:
            first_ms, first = run_job(args, mode, work / "first", work / f"{mode}-first")
            all_ms, spent = run_job(args, mode, work / "all", work / f"{mode}-all")
            spent.subtract(first)
            print(f"pyflink_{mode}: {first_ms} ms for the first file, {all_ms} for all", file=sys.stderr)
            if all_ms <= first_ms:
                raise SystemExit("all files took no longer than the first one: give more --events")
            figures[f"pyflink_{mode}"] = round(data.events / (all_ms - first_ms) * 1e3)
            millions = data.events / 1e6
            cpu[f"pyflink_{mode}"] = {k: round(spent[k] / 1e3 / millions, 3) for k in ("jvm", "others")}
            figures[f"ratio_to_pyflink_{mode}"] = figures["dstl_processor"] / figures[f"pyflink_{mode}"]
    return {**figures, "cpu": cpu}


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench peers", description=__doc__)
    parser.add_argument("--pyflink", required=True, metavar="PYTHON", help="that has apache-flink (tried: 2.3)")
    parser.add_argument("--events", type=int, default=120_000, help="of all measured files: a minute for PyFlink")
    parser.add_argument("--keys", type=int, default=20_000)
    parser.add_argument("--batches", type=int, default=8, help="measured files, one more for the start")
    parser.add_argument("--interval-ms", type=int, default=1000, help="between PyFlink's checkpoints (default 1000)")
    parser.add_argument("--timeout-s", type=float, default=1800.0, help="of one job of PyFlink's")
    add_stream_arguments(parser)
    args = parser.parse_args(argv)
    args.key_type = "long"
    print_figures(run(args), as_json=args.json)
    return 0
