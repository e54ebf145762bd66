"""Compares the state and output of the demo's job with the independent computation."""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from dstl.demo.aircraft import STATE_NAME, Alert, State, expected_result
from dstl.demo.job import OPERATOR, JobConfig
from dstl.option_sources import resolve
from dstl.options import S3Options, SealingOptions
from dstl.runtime import system_runtime
from dstl.spark.saved_state.reader import find_checkpoint, read_state
from dstl.store.location import open_store

__all__ = ["Verdict", "judge"]


@dataclass(frozen=True, slots=True)
class Verdict:
    """The comparison.

    Attributes:
        batches: Batches that the last checkpoint has behind it.
        keys: Aircraft compared, the null key included.
        rows: Output rows compared.
        state_differences: Keys that are missing, superfluous or have another state.
        output_differences: Rows that are missing, superfluous or written more than once.
    """

    batches: int
    keys: int
    rows: int
    state_differences: int
    output_differences: int


def judge(config: JobConfig, flights: pa.Table) -> Verdict:
    """Read the last checkpoint's state and the sink's rows, and compare both with :func:`expected_result`."""
    expected_states, expected_alerts = expected_result(flights)
    batches, states = asyncio.run(_states(config))
    alerts = _alerts(Path(config.work))
    differing = sum(1 for key in states.keys() | expected_states.keys() if states.get(key) != expected_states.get(key))
    surplus, lacking = alerts - expected_alerts, expected_alerts - alerts
    return Verdict(
        batches=batches,
        keys=len(expected_states),
        rows=sum(expected_alerts.values()),
        state_differences=differing,
        output_differences=surplus.total() + lacking.total(),
    )


async def _states(config: JobConfig) -> tuple[int, dict[str | None, State]]:
    runtime = system_runtime()
    sealing = resolve("sealing", SealingOptions, None, os.environ, {})  # as the job itself, whose environment this is
    store = open_store(config.location, S3Options(endpoint_url=config.endpoint_url), sealing)
    try:
        checkpoint = await find_checkpoint(store, runtime)
        rows = read_state(store, runtime, checkpoint, OPERATOR, STATE_NAME)
        return checkpoint.batch_id + 1, {row.key[0]: row.value async for row in rows}
    finally:
        await store.close()


def _alerts(work: Path) -> Counter[Alert]:
    table = pq.read_table(work / "alerts.parquet", columns=["tail", "number", "kind", "detail"])
    return Counter(zip(*(column.to_pylist() for column in table.columns), strict=True))
