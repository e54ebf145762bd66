"""Groups the rows of a task by key.

Spark does not sort streaming data, so a task gathers its partition's rows of one micro-batch and groups them itself,
on columns. A micro-batch's partition must therefore fit a worker's memory, as it must for Spark's own
``applyInPandas``; more partitions or smaller batches make it smaller.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from dstl.column_buffers import array_of
from dstl.state.keyed_batch import INITIAL_STATE_COLUMN, KEY_GROUP_COLUMN
from dstl.state.vectorised.key_codes import Groups, by_key_group, group_codes

_ROWS_PER_BATCH = 1 << 14
"""Some megabytes of usual rows, of which a reader makes Python objects at once."""
_MOST_BYTES = 1 << 30
"""Half of what the 32-bit offsets of text reach, so that the next batch can be appended to one that is held."""


def group_rows(
    batches: Iterable[pa.RecordBatch],
    by: Sequence[str],
    rows_per_batch: int = _ROWS_PER_BATCH,
    most_bytes: int = _MOST_BYTES,
) -> Iterator[pa.RecordBatch]:
    """Yield the same rows with equal keys standing together, in batches of at most ``rows_per_batch`` rows.

    A batch has at most ``most_bytes`` bytes, too, unless a row alone has more.

    Rows of one key keep their order. Keys come in the order of their key groups, as a TaskManager's tables have them
    (scattered keys cost it twice the time), and within one in that of their first row. Nulls are equal to each other;
    so are NaNs, and -0.0 equals 0.0, as in Spark's own grouping.
    """
    held = [batch for batch in batches if batch.num_rows]
    if not held:
        return
    table = pa.Table.from_batches(held)
    groups = Groups(group_codes(table, by))
    codes = groups.reordered(by_key_group(table, groups.first_rows())[0]).codes
    if table.nbytes > most_bytes:
        yield from _picked(held, np.argsort(codes, kind="stable"), rows_per_batch, most_bytes)
        return
    if np.any(codes[1:] < codes[:-1]):
        table = table.take(array_of(np.argsort(codes, kind="stable")))
    yield from table.combine_chunks().to_batches(max_chunksize=rows_per_batch)


def _picked(
    batches: Sequence[pa.RecordBatch], rows: npt.NDArray[np.intp], most_rows: int, most_bytes: int
) -> Iterator[pa.RecordBatch]:
    """Yield rows in their order, from wherever they are: the text of all of them may be too much for one array."""
    sizes = [batch.num_rows for batch in batches]
    weights = np.repeat([batch.nbytes / batch.num_rows for batch in batches], sizes)[rows]
    before = np.concatenate([[0.0], np.cumsum(weights)])
    ends, start = np.cumsum(sizes), 0
    while start < len(rows):
        reached = int(np.searchsorted(before, before[start] + most_bytes, side="right")) - 1
        stop = min(max(reached, start + 1), start + most_rows, len(rows))
        yield from _taken(batches, ends, rows[start:stop], most_bytes)
        start = stop


def _taken(
    batches: Sequence[pa.RecordBatch], ends: npt.NDArray[np.intp], rows: npt.NDArray[np.intp], most_bytes: int
) -> Iterator[pa.RecordBatch]:
    """Yield rows in one batch, or in halves where they turn out to be larger than most."""
    of = np.searchsorted(ends, rows, side="right")
    order = np.argsort(of, kind="stable")
    parts = [
        batches[index].take(array_of(rows[of == index] - (ends[index] - batches[index].num_rows)))
        for index in np.unique(of)
    ]
    if len(rows) > 1 and sum(part.nbytes for part in parts) > most_bytes:
        middle = len(rows) // 2
        del parts
        yield from _taken(batches, ends, rows[:middle], most_bytes)
        yield from _taken(batches, ends, rows[middle:], most_bytes)
        return
    yield pa.concat_batches(parts).take(array_of(np.argsort(order, kind="stable")))


class Marked(NamedTuple):
    """The rows of a task, those that were sent to its partition by number apart from those sent by key.

    Attributes:
        partition: The number; None where nothing was sent by number.
        marks: Rows sent by number: marks, and rows of broadcast streams.
        rows: The others.
    """

    partition: int | None
    marks: list[pa.RecordBatch]
    rows: list[pa.RecordBatch]


def take_marks(batches: Iterable[pa.RecordBatch], helpers: Sequence[str] = ()) -> Marked:
    """Return the rows whose key group is a mark, and the others without the columns that only marks have.

    A partition of a DataFrame that is in a union with itself has two marks, of equal numbers.
    """
    partition: int | None = None
    marks: list[pa.RecordBatch] = []
    rest: list[pa.RecordBatch] = []
    for batch in batches:
        groups = batch.column(KEY_GROUP_COLUMN)
        lowest = pc.min(groups).as_py()
        if lowest is not None and lowest < 0:
            partition = -1 - lowest
            by_key = pc.greater_equal(groups, 0)
            marks.append(batch.filter(pc.invert(by_key)))
            batch = batch.filter(by_key)
        if batch.num_rows:
            rest.append(batch.drop_columns(list(helpers)) if helpers else batch)
    return Marked(partition, marks, rest)


def initial_first(batches: Iterable[pa.RecordBatch]) -> list[pa.RecordBatch]:
    """Return the same rows, those that carry initial state first: a shuffle keeps no order."""
    first, rest = [], []
    for batch in batches:
        carries = batch.column(INITIAL_STATE_COLUMN).is_valid()
        first.append(batch.filter(carries))
        rest.append(batch.filter(pc.invert(carries)))
    return [batch for batch in (*first, *rest) if batch.num_rows]
