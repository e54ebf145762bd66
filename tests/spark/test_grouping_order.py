"""How a task lays its rows out: by key group, then by key, each key's rows as they came."""

import random

import pyarrow as pa

from dstl.spark.operators.grouping import group_rows
from dstl.state.keyed_batch import KEY_GROUP_COLUMN


def test_more_text_than_one_array_takes_is_grouped_in_parts(seed: int) -> None:
    """Before, a partition with 2 GiB of text in one column failed with Arrow's own error, at every restart alike."""
    rng = random.Random(seed)
    texts = ["x" * (rng.choice([0, 10, 300]) if i != 500 else 9000) for i in range(1000)]
    nested = [{"a": [text, None], "m": [("k", text)]} for text in texts]
    table = pa.table(
        {
            "k": [i * 7 % 31 for i in range(1000)],
            KEY_GROUP_COLUMN: [i * 7 % 31 % 5 for i in range(1000)],
            "text": texts,
            "nested": pa.array(
                nested, pa.struct([("a", pa.list_(pa.string())), ("m", pa.map_(pa.string(), pa.string()))])
            ),
        }
    )
    batches = table.to_batches(max_chunksize=99)
    whole = [row for batch in group_rows(iter(batches), ["k"]) for row in batch.to_pylist()]
    parts = list(group_rows(iter(batches), ["k"], rows_per_batch=64, most_bytes=5000))
    assert [row for batch in parts for row in batch.to_pylist()] == whole
    assert all(batch.nbytes <= 5000 or batch.num_rows == 1 for batch in parts)
    assert max(batch.num_rows for batch in parts) <= 64
    assert {batch.schema for batch in parts} == {table.schema}


def test_keys_come_by_key_group_and_rows_of_a_key_as_they_came(seed: int) -> None:
    rng = random.Random(seed)
    keys = [rng.choice([None, *range(40)]) for _ in range(1000)]
    rows = [{"k": k, "i": i, KEY_GROUP_COLUMN: (k or 0) % 7} for i, k in enumerate(keys)]
    batches = pa.Table.from_pylist(rows).to_batches(max_chunksize=99)
    out = [row for batch in group_rows(iter(batches), ["k"], rows_per_batch=64) for row in batch.to_pylist()]
    first = {k: keys.index(k) for k in keys}
    assert out == sorted(rows, key=lambda row: (row[KEY_GROUP_COLUMN], first[row["k"]], row["i"]))
