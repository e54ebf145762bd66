"""The runner of a grouped aggregation by session windows, which grow and merge as rows come.

Beside the sessions' accumulators there is a state with the bounds of each key's open sessions, sixteen bytes a session:
it tells which sessions new rows touch, and so which accumulators have to be read. Nothing runs per row, key or session
in Python.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.types import BinaryType, StructField, StructType

from dstl.column_buffers import array_of, binary_of, from_int64, items_of, numpy_of, to_int64
from dstl.state.registry import StateRegistry
from dstl.state.task_input import TaskInput
from dstl.state.vectorised.aggregation import AggregateStates
from dstl.state.vectorised.column_state import ColumnState, KeyGroups
from dstl.state.vectorised.group_runner import GroupRunner, late_after
from dstl.state.vectorised.key_codes import Codes, Groups, by_key_group, group_codes
from dstl.state.vectorised.time_windows import Windows, merge_sessions

_BOUNDS = StructType([StructField("bounds", BinaryType())])
_SESSION = np.dtype([("start", "<i8"), ("end", "<i8")])


class SessionRunner(GroupRunner):
    """Runs one task of a grouped aggregation by sessions, in output mode append or complete.

    ``late_rows`` are late windows of single rows, each counted once for its key, start and end.
    """

    def _declared(self, registry: StateRegistry) -> AggregateStates:
        states = super()._declared(registry)
        self._bounds = _OpenSessions(states, registry)
        return states

    def _with_gap(self, rows: pa.Table) -> pa.Table:
        """Return the rows whose gap is longer than nothing; the others are in no session, as in Spark."""
        assert self._aggregation.starts is not None
        assert self._aggregation.ends is not None
        lasts = pc.greater(rows.column(self._aggregation.ends), rows.column(self._aggregation.starts))
        return rows.filter(lasts).combine_chunks()

    def _with_rows(self, rows: pa.Table, task: TaskInput, handled: list[pa.Array]) -> Iterator[pa.RecordBatch]:
        rows = self._with_gap(rows)
        aggregation, states = self._aggregation, self._states
        assert aggregation.starts is not None
        assert aggregation.ends is not None
        moment = states.moment
        # Rows of one key, start and end are one piece.
        pieces = Groups(group_codes(rows, [*aggregation.others, aggregation.starts, aggregation.ends]))
        first = pieces.first_rows()
        starts, ends = (
            to_int64(rows.column(name).combine_chunks())[first] for name in (aggregation.starts, aggregation.ends)
        )
        if aggregation.expires is not None:
            kept = ends > late_after(task)
            self.late_rows += int(len(kept) - np.count_nonzero(kept))
            if not kept.all():
                rows, pieces, first = self._without(rows, pieces, kept)
                starts, ends = starts[kept], ends[kept]
        if not pieces.count:
            return
        partial = states.fold(states.nothing(pieces.count), rows, pieces)
        # The keys, in the order of their key groups, and what is open of each.
        by_key = Groups(group_codes(rows, aggregation.others))
        heads = by_key.first_rows()
        order, key_groups = by_key_group(rows, heads)
        by_key, heads = by_key.reordered(order), heads[order]
        others = rows.select(aggregation.others).take(array_of(heads)).combine_chunks()
        others = states.keys.canonical([column.combine_chunks() for column in others.columns])
        names, stored, open_before = self._bounds.fetch(task, key_groups, others, moment)
        prior = len(open_before.keys)
        whole = Windows(
            np.concatenate((open_before.keys, by_key.codes[first])),
            np.concatenate((open_before.starts, starts)),
            np.concatenate((open_before.ends, ends)),
        )
        sorted_, of_piece, sessions = merge_sessions(whole)
        is_new = sorted_ >= prior
        touched = np.zeros(len(sessions.keys), np.bool_)
        touched[of_piece[is_new]] = True
        over = np.zeros(len(sessions.keys), np.bool_)
        if aggregation.expires is not None and aggregation.mode != "complete":
            over = sessions.ends <= task.watermark_ms * 1000
        # What is read: the stored sessions of those that are touched, or over.
        wanted = (touched | over)[of_piece] & ~is_new
        read = sorted_[wanted]
        columns = self._columns(whole, read, others, moment)
        read_groups = key_groups[whole.keys[read]]
        read_keys = states.keys.encode_array(columns, len(read))
        handled.append(read_keys)
        before = states.stored.fetch(task, read_groups, read_keys)
        # Pieces in the order of their starts: stored ones as they were read, new ones as they were folded.
        taken = wanted | is_new
        number = np.full(len(sessions.keys), -1, np.int64)
        chosen = np.flatnonzero(touched | over)
        number[chosen] = np.arange(len(chosen))
        position = np.empty(len(sorted_), np.int64)
        position[wanted] = np.arange(len(read))
        position[is_new] = len(read) + sorted_[is_new] - prior
        at = array_of(position[taken])
        spread = [
            pa.concat_arrays([one, two]).take(at) for one, two in zip(states.decode(before), partial, strict=True)
        ]
        merged = states.merge(spread, Groups(number[of_piece[taken]]))
        left = ~over[chosen]
        going = [each.filter(array_of(left)) for each in merged]
        self._send(task, sessions, chosen[left], (read_groups, read_keys, before), going, (others, key_groups))
        self._bounds.put(task, names, key_groups, stored, _kept(sessions, ~over))
        done = over[chosen] if aggregation.mode == "append" else np.ones(len(chosen), np.bool_)
        shown = chosen[done]
        if aggregation.mode == "complete":
            handled.append(states.keys.encode_array(self._columns(sessions, shown, others, moment), len(shown)))
        if len(shown):
            yield states.output(
                self._columns(sessions, shown, others, moment), [each.filter(array_of(done)) for each in merged]
            )

    def _send(
        self,
        task: TaskInput,
        sessions: Windows,
        ids: Codes,
        read: tuple[KeyGroups, pa.Array, pa.Array],
        accumulated: list[pa.Array],
        owners: tuple[list[pa.Array], KeyGroups],
    ) -> None:
        """Send the sessions that are left, and the end of stored ones that are over or part of another one now."""
        states = self._states
        moment = states.moment
        others, key_groups = owners
        keys = states.keys.encode_array(self._columns(sessions, ids, others, moment), len(ids))
        groups = key_groups[sessions.keys[ids]]
        read_groups, read_keys, before = read
        # A stored session that has not grown is put again, under the same key.
        place = pc.index_in(keys, value_set=read_keys) if len(read_keys) else pa.nulls(len(keys), pa.int32())
        gone = np.ones(len(read_keys), np.bool_)
        gone[numpy_of(place.drop_null())] = False
        states.stored.delete(task, read_groups[gone], read_keys.filter(array_of(gone)))
        states.put(task, groups, keys, before.take(place), accumulated)

    def _columns(self, windows: Windows, ids: Codes, others: list[pa.Array], moment: pa.DataType) -> list[pa.Array]:
        """Return the key's columns of some windows."""
        owners = array_of(windows.keys[ids])
        bounds = [from_int64(each[ids], None, moment) for each in (windows.starts, windows.ends)]
        return [*bounds, *(column.take(owners) for column in others)]

    def _ended(
        self, task: TaskInput, key_groups: KeyGroups, columns: list[pa.Array], values: pa.Array
    ) -> pa.RecordBatch:
        self._bounds.end(task, key_groups, columns, task.watermark_ms * 1000)
        return super()._ended(task, key_groups, columns, values)


class _OpenSessions:
    """The bounds of each key's open sessions: pairs of microseconds, by start.

    They lie under the key's own columns with neither start nor end, so that one key schema does for both states.
    """

    def __init__(self, states: AggregateStates, registry: StateRegistry) -> None:
        self._keys = states.keys
        self._state = ColumnState(registry, "sessions", _BOUNDS)

    def fetch(
        self, task: TaskInput, key_groups: KeyGroups, others: list[pa.Array], moment: pa.DataType
    ) -> tuple[pa.Array, pa.Array, Windows]:
        """Return the bytes of keys, what is stored under them, and their open sessions."""
        nothing = pa.nulls(len(key_groups), moment)
        names = self._keys.encode_array([nothing, nothing, *others], len(key_groups))
        stored = self._state.fetch(task, key_groups, names)
        return names, stored, self._decoded(stored)

    def put(self, task: TaskInput, names: pa.Array, key_groups: KeyGroups, stored: pa.Array, sessions: Windows) -> None:
        """Send the open sessions of keys, which are numbered as the names are."""
        bounds = np.empty(len(sessions.keys), _SESSION)
        bounds["start"], bounds["end"] = sessions.starts, sessions.ends
        counts = np.bincount(sessions.keys, minlength=len(names))
        blobs = binary_of(bounds, counts * _SESSION.itemsize)
        columns = pa.RecordBatch.from_arrays([blobs], schema=self._state.schema)
        self._state.put(task, key_groups, names, stored, columns, counts > 0)

    def end(self, task: TaskInput, key_groups: KeyGroups, columns: list[pa.Array], until: int) -> None:
        """Forget the sessions of these keys that end at or before ``until``."""
        table = pa.table([*columns[2:]], names=[f"c{i}" for i in range(len(columns) - 2)])
        groups = Groups(group_codes(table, table.column_names))
        first = groups.first_rows()
        others = [column.take(array_of(first)) for column in columns[2:]]
        names, stored, sessions = self.fetch(task, key_groups[first], others, columns[0].type)
        self.put(task, names, key_groups[first], stored, _kept(sessions, sessions.ends > until))

    def _decoded(self, stored: pa.Array) -> Windows:
        bounds, owners = items_of(self._state.decode(stored).column(0), _SESSION)
        return Windows(owners, np.ascontiguousarray(bounds["start"]), np.ascontiguousarray(bounds["end"]))


def _kept(windows: Windows, kept: npt.NDArray[np.bool_]) -> Windows:
    return Windows(windows.keys[kept], windows.starts[kept], windows.ends[kept])
