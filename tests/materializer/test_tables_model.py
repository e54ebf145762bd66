"""Both tables against a plain dictionary: any sequence of changes, snapshots, restores and moves of key groups."""

import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from dstl.changelog.change_set import OP_CLEAR, OP_DELETE, OP_PUT
from dstl.options import RocksDBOptions
from materializer.bases.key_group_file import decode_key_group, encode_key_group
from materializer.tables import HeapStateTable, StateTable, TableSnapshot, columns, open_table
from worlds.table_changes import changes, content

GROUPS = range(4)
STATES = [0, 1, 300]
SMALL = RocksDBOptions(block_cache_bytes=1 << 20, write_buffer_bytes=64 << 10)

keys = st.sampled_from([b"", b"\0", b"\0\xff", b"a", b"a\0", b"ab", b"\xff"]) | st.binary(max_size=3)
user_keys = st.sampled_from([b"", b"", b"\0", b"u", b"u\0", b"\xff"])
values = st.binary(max_size=8)
change = st.tuples(
    st.sampled_from(list(GROUPS)),
    st.sampled_from(STATES),
    st.sampled_from([OP_PUT, OP_PUT, OP_PUT, OP_DELETE, OP_CLEAR]),
    keys,
    user_keys,
    values,
)
Model = dict[tuple[int, int, bytes, bytes], bytes]


class TableMachine(RuleBasedStateMachine):
    """Two tables (key groups move between them), snapshots that must never change, encoded key groups."""

    kind: str
    snapshots = Bundle("snapshots")
    files = Bundle("files")

    def __init__(self) -> None:
        super().__init__()
        self.directory = Path(tempfile.mkdtemp())
        self.tables: list[StateTable] = [self.open(i) for i in range(2)]
        self.models: list[Model] = [{}, {}]
        self.opened: list[tuple[TableSnapshot, Model]] = []

    def open(self, at: int) -> StateTable:
        return open_table(self.kind, self.directory / f"table-{at}", rocksdb=SMALL)  # type: ignore[arg-type]

    @rule(at=st.integers(0, 1), rows=st.lists(change, max_size=12))
    def apply(self, at: int, rows: list[tuple[int, int, int, bytes, bytes, bytes]]) -> None:
        self.tables[at].apply(changes(*rows))
        model = self.models[at]
        for group, state, op, key, user_key, value in rows:
            if op == OP_PUT:
                model[group, state, key, user_key] = value
            elif op == OP_DELETE:
                model.pop((group, state, key, user_key), None)
            else:
                for address in [a for a in model if a[:3] == (group, state, key)]:
                    del model[address]

    @rule(
        at=st.integers(0, 1),
        state=st.sampled_from(STATES),
        asked=st.lists(st.tuples(st.sampled_from(list(GROUPS)), keys)),
    )
    def read(self, at: int, state: int, asked: list[tuple[int, bytes]]) -> None:
        model, table = self.models[at], self.tables[at]
        groups, names = [g for g, _ in asked], [k for _, k in asked]
        assert table.get_many(state, groups, names) == [model.get((g, state, k, b"")) for g, k in asked]
        assert table.get_entries(state, groups, names) == [
            sorted((a[3], v) for a, v in model.items() if a[:3] == (g, state, k)) for g, k in asked
        ]
        for group, key in asked[:2]:
            assert table.get_entry(state, group, key, [b"", b"u"]) == [
                model.get((group, state, key, u)) for u in (b"", b"u")
            ]

    @rule(
        at=st.integers(0, 1),
        state=st.sampled_from(STATES),
        group=st.sampled_from(list(GROUPS)),
        limit=st.integers(1, 5),
        after=st.none() | st.tuples(keys, user_keys),
        before=st.none() | keys,
    )
    def scan(
        self, at: int, state: int, group: int, limit: int, after: tuple[bytes, bytes] | None, before: bytes | None
    ) -> None:
        found = self.tables[at].scan(state, group, after=after, before_key=before, limit=limit)
        entries = sorted((a[2], a[3], v) for a, v in self.models[at].items() if a[:2] == (group, state))
        expected = [e for e in entries if (after is None or e[:2] > after) and (before is None or e[0] < before)]
        assert found == expected[:limit]

    @rule(target=snapshots, at=st.integers(0, 1))
    def snapshot(self, at: int) -> object:
        if len(self.opened) >= 4:
            return multiple()
        taken = (self.tables[at].snapshot(), dict(self.models[at]))
        self.opened.append(taken)
        return taken

    @rule(taken=consumes(snapshots))
    def close_snapshot(self, taken: tuple[TableSnapshot, Model]) -> None:
        assert content(taken[0], GROUPS) == taken[1]
        taken[0].close()
        self.opened.remove(taken)

    @rule(target=files, taken=snapshots, group=st.sampled_from(list(GROUPS)))
    def encode(self, taken: tuple[TableSnapshot, Model], group: int) -> object:
        return group, encode_key_group(taken[0], group).data, {a: v for a, v in taken[1].items() if a[0] == group}

    @rule(at=st.integers(0, 1), file=files)
    def restore(self, at: int, file: tuple[int, bytes, Model]) -> None:
        group, data, kept = file
        before = self.tables[at].version(group)
        self.tables[at].restore(group, decode_key_group(data, group))
        assert self.tables[at].version(group) > before
        self.models[at] = {a: v for a, v in self.models[at].items() if a[0] != group} | kept

    @rule(at=st.integers(0, 1), group=st.sampled_from(list(GROUPS)))
    def move(self, at: int, group: int) -> None:
        snapshot = self.tables[at].snapshot()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(columns, "PAGE_ROWS", 2)
            self.tables[1 - at].restore(group, snapshot.entries(group))
        self.tables[at].drop_key_group(group)
        snapshot.close()
        moved = {a: v for a, v in self.models[at].items() if a[0] == group}
        for address in moved:
            del self.models[at][address]
        self.models[1 - at] = {a: v for a, v in self.models[1 - at].items() if a[0] != group} | moved

    @rule(at=st.integers(0, 1), group=st.sampled_from(list(GROUPS)), state=st.sampled_from(STATES))
    def expire(self, at: int, group: int, state: int) -> None:
        dead = [a for a, v in self.models[at].items() if a[:2] == (group, state) and len(v) > 4]
        assert sum(self.tables[at].drop_expired(group, {state: lambda value: len(value) > 4})) == len(dead)
        for address in dead:
            del self.models[at][address]

    @invariant()
    def sizes_agree(self) -> None:
        for table, model in zip(self.tables, self.models, strict=True):
            size = table.size()
            if isinstance(table, HeapStateTable):
                assert size.entries == len(model)
                assert size.bytes == sum(len(a[2]) + len(a[3]) + len(v) for a, v in model.items())
            assert {a[0] for a in model} <= set(table.key_groups())

    def teardown(self) -> None:
        try:
            for taken in self.opened:
                assert content(taken[0], GROUPS) == taken[1]
            for table, model in zip(self.tables, self.models, strict=True):
                snapshot = table.snapshot()
                assert content(snapshot, GROUPS) == model
                snapshot.close()
        finally:
            for snapshot, _ in self.opened:
                snapshot.close()
            for table in self.tables:
                with suppress(Exception):
                    table.close()
            shutil.rmtree(self.directory, ignore_errors=True)


class HeapMachine(TableMachine):
    kind = "heap"


class RocksDBMachine(TableMachine):
    kind = "rocksdb"


_common = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
HeapMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, **_common)
RocksDBMachine.TestCase.settings = settings(max_examples=12, stateful_step_count=25, **_common)
TestHeapMachine = HeapMachine.TestCase
TestRocksDBMachine = RocksDBMachine.TestCase
