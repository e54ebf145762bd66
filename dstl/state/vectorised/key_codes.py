"""Numbers for the rows of equal keys: each row gets the position of its key among the distinct keys.

Nothing runs per row in Python but for keys that hold arrays or maps.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from dstl.column_buffers import array_of, numpy_of
from dstl.errors import Invalid
from dstl.state.codec.key_codec import canonical_column
from dstl.state.keyed_batch import KEY_GROUP_COLUMN

_MOST_BYTES = (1 << 31) - 1
"""Of text or nested data in one array: what its 32-bit offsets reach."""

Codes = npt.NDArray[np.int64]
"""For each row, the number of its key."""


def whole_table(batches: Sequence[pa.RecordBatch]) -> pa.Table:
    """Return the rows of a task, each column in one chunk.

    Raises:
        Invalid: A column has more text, or nested data, than fits one.
    """
    table = pa.Table.from_batches(batches)
    if len(batches) == 1:
        return table
    for field, column in zip(table.schema, table.columns, strict=True):
        if column.nbytes > _MOST_BYTES and not pa.types.is_primitive(field.type):
            raise Invalid(
                f"column {field.name!r} has {column.nbytes / 1e6:,.0f} MB in one partition of one micro-batch, and a "
                f"vectorised operator takes {_MOST_BYTES / 1e6:,.0f} MB: restart with a larger parallelism, which this "
                "batch is then replayed with; smaller batches (maxFilesPerTrigger, maxOffsetsPerTrigger) keep later "
                "ones below"
            )
    return table.combine_chunks()


def group_codes(table: pa.Table, by: Sequence[str]) -> Codes:
    """Return a number per row, equal for equal keys: dense, from 0, in the order of the keys' first rows.

    Nulls are equal to each other; so are NaNs, and -0.0 equals 0.0, as in Spark's own grouping.
    """
    combined = _column_codes(table.column(by[0]))
    for name in by[1:]:
        combined = _paired(combined, _column_codes(table.column(name)))
    return combined


def with_steps(codes: Codes, moments: npt.NDArray[np.int64], step: int) -> Codes:
    """Return a number per row, equal for rows of equal codes and equal moments: dense, from 0, in order of first rows.

    Args:
        codes: For each row a number from 0.
        moments: For each row a number; they differ by multiples of ``step``.
        step: What the moments are counted in, above 0.
    """
    lowest = int(moments.min())
    if (int(moments.max()) - lowest) // step < (1 << 62) // (int(codes.max()) + 1):
        return _paired(codes, (moments - lowest) // step)
    return _paired(codes, _encoded(array_of(moments)))


class Groups:
    """The distinct keys of some rows.

    Attributes:
        codes: For each row the number of its key.
        count: How many distinct keys there are; every number below it occurs.
    """

    def __init__(self, codes: Codes) -> None:
        self.codes = codes
        self.count = int(codes.max(initial=-1)) + 1

    def sizes(self) -> Codes:
        """Return how many rows each key has."""
        return np.bincount(self.codes, minlength=self.count).astype(np.int64, copy=False)

    def first_rows(self, among: Codes | None = None) -> Codes:
        """Return the position of each key's first row, -1 where it has none.

        Args:
            among: Ascending positions of the rows that count; None for all.
        """
        return self._rows(among, backwards=True)

    def last_rows(self, among: Codes | None = None) -> Codes:
        """Return the position of each key's last row, -1 where it has none; see :meth:`first_rows`."""
        return self._rows(among, backwards=False)

    def reordered(self, order: Codes) -> Groups:
        """Return the same groups with other numbers: ``order[i]`` is the old number of the new group ``i``."""
        rank = np.empty(self.count, np.int64)
        rank[order] = np.arange(self.count)
        return Groups(rank[self.codes])

    def _rows(self, among: Codes | None, *, backwards: bool) -> Codes:
        # Of several assignments to one place the last one stays.
        found = np.full(self.count, -1, np.int64)
        rows = np.arange(len(self.codes)) if among is None else among
        step = -1 if backwards else 1
        found[self.codes[rows][::step]] = rows[::step]
        return found


def by_key_group(rows: pa.Table, positions: Codes) -> tuple[Codes, npt.NDArray[np.uint16]]:
    """Return the order of some rows by their key groups, and those in that order."""
    key_groups = numpy_of(rows.column(KEY_GROUP_COLUMN).combine_chunks())[positions].astype(np.uint16)
    order = np.argsort(key_groups, kind="stable")
    return order, key_groups[order]


def parts_of_whole_keys(rows: pa.Table, codes: Codes, part_rows: int) -> Iterator[tuple[pa.Table, Codes]]:
    """Yield rows in parts of about ``part_rows``, those of one key in one part, in the order of the keys' numbers.

    Args:
        rows: The rows.
        codes: The number of each row's key.
        part_rows: Rows of a part, about; a key with more is a part of its own.

    Yields:
        The rows of a part in their order, and the numbers of their keys, from 0 in each part.
    """
    if rows.num_rows <= part_rows:
        yield rows, codes
        return
    ends = np.cumsum(Groups(codes).sizes())
    order = np.argsort(codes, kind="stable")
    parts = ends // part_rows
    cuts = [0, *(np.flatnonzero(parts[1:] != parts[:-1]) + 1).tolist(), len(ends)]
    for start, stop in pairwise(cuts):
        picked = np.sort(order[ends[start - 1] if start else 0 : ends[stop - 1]])
        yield rows.take(array_of(picked)).combine_chunks(), codes[picked] - start


def _column_codes(column: pa.ChunkedArray | pa.Array) -> Codes:
    kind = column.type
    if pa.types.is_struct(kind):
        codes = _encoded(column.is_null())
        for index in range(kind.num_fields):
            codes = _paired(codes, _column_codes(pc.struct_field(column, index)))
        return codes
    if pa.types.is_nested(kind):
        seen: dict[str, int] = {}
        return np.array([seen.setdefault(repr(_one_form(each)), len(seen)) for each in column.to_pylist()], np.int64)
    return _encoded(canonical_column(column))


def _one_form(value: Any) -> Any:
    """Return the same value, with 0.0 for each -0.0 in it, and the entries of a map in one order."""
    if isinstance(value, float):
        return value + 0.0
    if isinstance(value, dict):
        return {name: _one_form(each) for name, each in value.items()}
    if not isinstance(value, (list, tuple)):
        return value
    parts = [_one_form(each) for each in value]
    # Arrow gives an entry of a map as a tuple, and nothing else.
    return sorted(parts, key=repr) if any(isinstance(each, tuple) for each in value) else parts


def _encoded(column: pa.ChunkedArray | pa.Array) -> Codes:
    whole = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    if isinstance(whole, pa.ChunkedArray):  # above 2 GiB of text
        whole = whole.dictionary_encode(null_encoding="encode").unify_dictionaries()
        return np.concatenate([numpy_of(chunk.indices) for chunk in whole.chunks]).astype(np.int64)
    return numpy_of(whole.dictionary_encode(null_encoding="encode").indices).astype(np.int64)


def _paired(first: Codes, second: Codes) -> Codes:
    # Re-encoding after each column keeps the product of two cardinalities far below 2**63.
    return _encoded(array_of(first * (int(second.max(initial=0)) + 1) + second))
