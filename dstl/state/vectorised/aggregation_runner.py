"""The runner of a grouped aggregation by windows that do not depend on other rows, in every output mode.

Rows are folded into panes first, the pieces that overlapping windows are made of, and panes into windows: a row that is
in many windows is looked at once. Nothing runs per row, or per group, in Python.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from dstl.column_buffers import array_of, from_int64, to_int64, valid_of
from dstl.state.task_input import TaskInput
from dstl.state.vectorised.column_state import KeyGroups
from dstl.state.vectorised.group_runner import GroupRunner, is_over, late_after
from dstl.state.vectorised.key_codes import Codes, Groups, by_key_group, group_codes, parts_of_whole_keys, with_steps


class _Groups(NamedTuple):
    """The groups that some rows belong to, in the order of their key groups.

    Attributes:
        columns: Their keys' columns, canonical.
        keys: The keys' bytes.
        key_groups: Their key groups.
        before: Stored values, null where there is none.
        accumulated: Accumulators with the rows folded in.
    """

    columns: list[pa.Array]
    keys: pa.Array
    key_groups: KeyGroups
    before: pa.Array
    accumulated: list[pa.Array]


class AggregationRunner(GroupRunner):
    """Runs one task of a grouped aggregation without sessions. ``late_rows`` are groups, each counted once a batch."""

    def _with_rows(self, rows: pa.Table, task: TaskInput, handled: list[pa.Array]) -> Iterator[pa.RecordBatch]:
        for part, by_key in parts_of_whole_keys(rows, group_codes(rows, self._row_keys), task.call_rows):
            groups = self._folded(part, by_key, task)
            if groups is not None:
                yield from self._emitted(groups, task, handled)

    @property
    def _row_keys(self) -> list[str]:
        of_window = () if self._aggregation.starts is None else (self._aggregation.starts, self._aggregation.ends)
        return [*(each for each in of_window if each), *self._aggregation.others]

    def _folded(self, rows: pa.Table, by_key: Codes, task: TaskInput) -> _Groups | None:
        """Fold rows, with the numbers of their keys, into their groups' states; None where all of them are late."""
        windows = self._aggregation.windows
        if windows is not None:
            return self._of_windows(rows, by_key, task)
        groups = Groups(by_key)
        first = groups.first_rows()
        taken = rows.select(self._row_keys).take(array_of(first)).combine_chunks()
        columns = [column.combine_chunks() for column in taken.columns]
        kept = self._on_time(columns, task)
        if not kept.all():
            rows, groups, first = self._without(rows, groups, kept)
            if not groups.count:
                return None
            columns = [column.filter(array_of(kept)) for column in columns]
        order, key_groups = by_key_group(rows, first)
        columns = [column.take(array_of(order)) for column in columns]
        return self._with_states(rows, groups.reordered(order), columns, key_groups, task)

    def _of_windows(self, rows: pa.Table, by_key: Codes, task: TaskInput) -> _Groups | None:
        windows = self._aggregation.windows
        assert windows is not None
        assert self._aggregation.time is not None
        kind = rows.column(self._aggregation.time).type
        panes = windows.panes(to_int64(rows.column(self._aggregation.time).combine_chunks()))
        cells = Groups(with_steps(by_key, panes, windows.pane))
        first = cells.first_rows()
        starts = panes[first]
        late_us = late_after(task)
        if not windows.overlap:
            kept = self._kept(starts + windows.size > late_us)
            if not kept.all():
                rows, cells, first = self._without(rows, cells, kept)
                starts = starts[kept]
            if not cells.count:
                return None
            order, key_groups = by_key_group(rows, first)
            columns = self._key_columns(rows, first[order], starts[order], kind)
            return self._with_states(rows, cells.reordered(order), columns, key_groups, task)
        # Folded into panes without prior state, then each pane into all of its windows.
        partial = self._states.fold(self._states.nothing(cells.count), rows, cells)
        of_cell, starts = windows.windows_of(starts)
        groups = Groups(with_steps(by_key[first][of_cell], starts, windows.slide))
        kept = self._kept(starts[groups.first_rows()] + windows.size > late_us)
        if not kept.all():
            among = kept[groups.codes]
            # A row is late when all of its windows are.
            self._set_aside(rows, (np.bincount(of_cell[among], minlength=cells.count) == 0)[cells.codes])
            of_cell, starts = of_cell[among], starts[among]
            groups = Groups((np.cumsum(kept) - 1)[groups.codes[among]])
        if not groups.count:
            return None
        heads = groups.first_rows()
        at, starts = first[of_cell[heads]], starts[heads]
        order, key_groups = by_key_group(rows, at)
        columns = self._key_columns(rows, at[order], starts[order], kind)
        keys, before = self._stored(columns, key_groups, task)
        groups = groups.reordered(order)
        prior = self._states.decode(before)
        # The prior state counts as having come first.
        spread = [pa.concat_arrays([p, c.take(array_of(of_cell))]) for p, c in zip(prior, partial, strict=True)]
        codes = np.concatenate((np.arange(groups.count), groups.codes))
        return _Groups(columns, keys, key_groups, before, self._states.merge(spread, Groups(codes)))

    def _key_columns(self, rows: pa.Table, at: Codes, starts: Codes, kind: pa.DataType) -> list[pa.Array]:
        windows = self._aggregation.windows
        assert windows is not None
        taken = rows.select(self._aggregation.others).take(array_of(at)).combine_chunks()
        moments = [from_int64(each, None, kind) for each in (starts, starts + windows.size)]
        return [*moments, *(column.combine_chunks() for column in taken.columns)]

    def _with_states(
        self, rows: pa.Table, groups: Groups, columns: list[pa.Array], key_groups: KeyGroups, task: TaskInput
    ) -> _Groups:
        keys, before = self._stored(columns, key_groups, task)
        folded = self._states.fold(self._states.decode(before), rows, groups)
        return _Groups(columns, keys, key_groups, before, folded)

    def _stored(self, columns: list[pa.Array], key_groups: KeyGroups, task: TaskInput) -> tuple[pa.Array, pa.Array]:
        """Return the keys of groups, whose columns become canonical, and their stored values."""
        columns[:] = self._states.keys.canonical(columns)
        keys = self._states.keys.encode_array(columns, len(key_groups))
        return keys, self._states.stored.fetch(task, key_groups, keys)

    def _on_time(self, columns: list[pa.Array], task: TaskInput) -> npt.NDArray[np.bool_]:
        """Return of which groups the rows are not late."""
        if self._aggregation.expires is None:
            return np.ones(len(columns[0]) if columns else 1, np.bool_)
        return self._kept(~is_over(self._expiry_of(columns), late_after(task)))

    def _kept(self, on_time: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
        """Return which groups are kept, and count the others; in complete mode, and without a watermark, all are."""
        if self._aggregation.mode == "complete" or self._aggregation.expires is None:
            return np.ones(len(on_time), np.bool_)
        self.late_rows += int(len(on_time) - np.count_nonzero(on_time))
        return on_time

    def _expiry_of(self, columns: list[pa.Array]) -> pa.Array:
        assert self._aggregation.expires is not None
        return columns[self._aggregation.key_schema.names.index(self._aggregation.expires)]

    def _emitted(self, groups: _Groups, task: TaskInput, handled: list[pa.Array]) -> Iterator[pa.RecordBatch]:
        """Send the groups' states and yield those that belong to the output now."""
        mode = self._aggregation.mode
        if mode == "complete" or self._aggregation.expires is None:
            handled.append(groups.keys)
            self._states.put(task, groups.key_groups, groups.keys, groups.before, groups.accumulated)
            yield self._states.output(groups.columns, groups.accumulated)
            return
        over = is_over(self._expiry_of(groups.columns), task.watermark_ms * 1000)
        if mode == "update":
            yield self._states.output(groups.columns, groups.accumulated)
        if not over.any():
            self._states.put(task, groups.key_groups, groups.keys, groups.before, groups.accumulated)
            return
        ended, going = array_of(over), array_of(~over)
        handled.append(groups.keys.filter(ended))
        held = over & valid_of(groups.before)
        self._states.stored.delete(task, groups.key_groups[held], groups.keys.filter(array_of(held)))
        left = [column.filter(going) for column in groups.accumulated]
        self._states.put(task, groups.key_groups[~over], groups.keys.filter(going), groups.before.filter(going), left)
        if mode == "append":
            done = [column.filter(ended) for column in groups.accumulated]
            yield self._states.output([column.filter(ended) for column in groups.columns], done)
