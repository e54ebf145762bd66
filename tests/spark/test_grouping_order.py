"""How a task lays its rows out: by key group, then by key, each key's rows as they came."""

from __future__ import annotations

import random

import pyarrow as pa

from dstl.spark.operators.grouping import group_rows
from dstl.state.keyed_batch import KEY_GROUP_COLUMN


def test_keys_come_by_key_group_and_rows_of_a_key_as_they_came(seed: int) -> None:
    rng = random.Random(seed)
    keys = [rng.choice([None, *range(40)]) for _ in range(1000)]
    rows = [{"k": k, "i": i, KEY_GROUP_COLUMN: (k or 0) % 7} for i, k in enumerate(keys)]
    batches = pa.Table.from_pylist(rows).to_batches(max_chunksize=99)
    out = [row for batch in group_rows(iter(batches), ["k"], rows_per_batch=64) for row in batch.to_pylist()]
    first = {k: keys.index(k) for k in keys}
    assert out == sorted(rows, key=lambda row: (row[KEY_GROUP_COLUMN], first[row["k"]], row["i"]))
