"""The part of ``TableContract`` about snapshots, restores, versions and expiry."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from dstl.errors import Closed, Invalid
from materializer.tables import columns
from materializer.tables.base import ENTRY_SCHEMA, StateTable
from worlds.table_changes import AWKWARD, changes, clear, content, put


class TableSnapshotContract:
    """The moments of a table. Each test opens tables of its own."""

    def open_table(self, directory: Path) -> StateTable:
        """Return an empty table that may keep files in ``directory``, which does not exist yet."""
        raise NotImplementedError("say how a table is opened")

    @pytest.fixture
    def table(self, tmp_path: Path) -> Iterator[StateTable]:
        """An empty table."""
        with closing(self.open_table(tmp_path / "table")) as table:
            yield table

    def test_a_snapshot_is_read_by_another_thread_while_writes_go_on(self, table: StateTable) -> None:
        """The reader sees its moment, the writer is not held up, and neither fails."""
        groups = range(8)
        rows = [put(g, s, b"k%d" % i, u, b"old") for g in groups for s, u in ((0, b""), (1, b"u")) for i in range(300)]
        table.apply(changes(*rows))
        snapshot = table.snapshot()
        seen: list[dict[tuple[int, int, bytes, bytes], bytes]] = []
        reader = threading.Thread(target=lambda: seen.extend(content(snapshot, groups) for _ in range(3)))
        reader.start()
        for turn in range(20):
            table.apply(
                changes(
                    *[
                        put(g, s, b"k%d" % (turn * 20 + i), b"u" * s, b"new")
                        for g in groups
                        for s in (0, 1)
                        for i in range(20)
                    ]
                )
            )
            table.apply(changes(*[clear(g, 1, b"k%d" % turn) for g in groups]))
        reader.join(60)
        snapshot.close()
        expected = {(g, s, k, u): v for g, s, _, k, u, v in rows}
        assert len(seen) == 3
        assert all(each == expected for each in seen)

    def test_pages_are_ordered_and_bounded(self, table: StateTable, monkeypatch: pytest.MonkeyPatch) -> None:
        """By state, key, user key; by rows and by bytes, with at least one row."""
        monkeypatch.setattr(columns, "PAGE_ROWS", 5)
        monkeypatch.setattr(columns, "PAGE_BYTES", 1000)
        rows = [
            put(1, s, k, u, b"v" * size)
            for s in (9, 2)
            for k in AWKWARD
            for u, size in ((b"", 10), (b"u", 200), (b"z", 5000))
        ]
        table.apply(changes(*rows))
        with closing(table.snapshot()) as snapshot:
            pages = list(snapshot.entries(1))
            assert all(page.schema.equals(ENTRY_SCHEMA) for page in pages)
            listed = [tuple(row.values()) for page in pages for row in page.to_pylist()]
            assert listed == sorted((s, k, u, v) for _, s, _, k, u, v in rows)
            for page in pages:
                assert 1 <= page.num_rows <= 5
                assert (
                    page.num_rows == 1
                    or sum(len(b) for row in page.to_pylist() for b in list(row.values())[1:]) <= 1000
                )
            assert list(snapshot.entries(77)) == []

    def test_a_closed_snapshot_is_not_read(self, table: StateTable) -> None:
        """Closing twice is harmless."""
        table.apply(changes(put(1, 0, b"a", b"", b"1")))
        snapshot = table.snapshot()
        snapshot.close()
        snapshot.close()
        with pytest.raises(Closed, match="snapshot"):
            list(snapshot.entries(1))

    def test_a_snapshot_outlives_its_table(self, tmp_path: Path) -> None:
        """An operator is closed while its materialization still runs."""
        table = self.open_table(tmp_path / "table")
        table.apply(changes(put(1, 0, b"a", b"", b"1")))
        snapshot = table.snapshot()
        table.close()
        assert content(snapshot, [1]) == {(1, 0, b"a", b""): b"1"}
        snapshot.close()

    def test_key_groups_move_to_another_table(self, table: StateTable, tmp_path: Path, seed: int) -> None:
        """Rescaling: restore some key groups elsewhere, drop them here."""
        rng = random.Random(seed)
        rows = [
            put(g, s, rng.randbytes(rng.randrange(6)), rng.choice([b"", b"u"]), rng.randbytes(9))
            for g in range(10)
            for s in (0, 7)
            for _ in range(50)
        ]
        table.apply(changes(*rows))
        with closing(self.open_table(tmp_path / "other")) as other, closing(table.snapshot()) as snapshot:
            whole = content(snapshot, range(10))
            for group in (3, 4, 9):
                other.restore(group, snapshot.entries(group))
                table.drop_key_group(group)
            assert list(other.key_groups()) == [3, 4, 9]
            assert list(table.key_groups()) == [0, 1, 2, 5, 6, 7, 8]
            with closing(other.snapshot()) as moved, closing(table.snapshot()) as left:
                assert content(moved, range(10)) == {a: v for a, v in whole.items() if a[0] in (3, 4, 9)}
                assert content(left, range(10)) == {a: v for a, v in whole.items() if a[0] not in (3, 4, 9)}
            group, state, key, user_key = next(a for a in whole if a[0] == 3)
            assert other.get_entry(state, group, key, [user_key]) == [whole[group, state, key, user_key]]
            assert table.get_entry(state, group, key, [user_key]) == [None]

    def test_restoring_replaces(self, table: StateTable) -> None:
        """Twice the same is once; nothing of the old content stays; other key groups are not touched."""
        table.apply(
            changes(put(1, 0, b"a", b"", b"base"), put(1, 3, b"m", b"x", b"base"), put(2, 0, b"a", b"", b"stays"))
        )
        with closing(table.snapshot()) as base:
            table.apply(
                changes(put(1, 0, b"b", b"", b"later"), put(1, 3, b"m", b"y", b"later"), put(1, 8, b"n", b"", b"later"))
            )
            for _ in range(2):
                table.restore(1, base.entries(1))
                with closing(table.snapshot()) as now:
                    assert content(now, [1, 2]) == content(base, [1, 2])
            table.restore(1, [])
            assert list(table.key_groups()) == [1, 2]
            assert table.get_many(0, [1, 2], [b"a", b"a"]) == [None, b"stays"]

    def test_pages_of_another_schema_are_refused(self, table: StateTable) -> None:
        """A change batch is not a page."""
        with pytest.raises(Invalid, match="schema"):
            table.restore(1, [changes(put(1, 0, b"a", b"", b"1"))])

    def test_versions_name_what_changed(self, table: StateTable) -> None:
        """Only key groups that changed since the last base need to be uploaded again."""
        table.apply(changes(put(1, 0, b"a", b"", b"1"), put(2, 0, b"a", b"", b"1")))
        with closing(table.snapshot()) as first:
            base = dict(first.versions)
        assert set(base) == {1, 2}
        table.apply(changes(put(2, 5, b"b", b"", b"1"), put(3, 0, b"a", b"", b"1")))
        with closing(table.snapshot()) as second:
            assert {g for g, v in second.versions.items() if base.get(g) != v} == {2, 3}
            assert dict(second.versions) == {g: table.version(g) for g in table.key_groups()}
            table.restore(1, second.entries(1))
        assert table.version(1) > base[1]
        before = table.version(2)
        table.drop_key_group(2)
        assert table.version(2) == 0
        table.apply(changes(put(2, 0, b"a", b"", b"1")))
        assert table.version(2) > before

    def test_expired_entries_are_dropped(self, table: StateTable) -> None:
        """Of the states that have a test, in one key group; snapshots keep them; versions stay."""
        table.apply(
            changes(
                *[
                    put(g, s, b"k%d" % i, u, b"dead" if i % 2 else b"live")
                    for g in (1, 2)
                    for s in (0, 1)
                    for i in range(6)
                    for u in (b"", b"x")
                ]
            )
        )
        with closing(table.snapshot()) as before:
            version = table.version(1)
            assert sum(table.drop_expired(1, {0: lambda value: value == b"dead", 99: lambda value: True})) == 6
            assert table.version(1) == version
            assert len(content(before, [1, 2])) == 48
        with closing(table.snapshot()) as after:
            left = content(after, [1, 2])
        assert len(left) == 42
        assert all(v == b"live" for (g, s, _, _), v in left.items() if (g, s) == (1, 0))
        assert [e.key for e in table.scan(0, 1)] == [b"k%d" % i for i in (0, 2, 4) for _ in "ux"]
        assert table.get_entries(0, [1], [b"k1"]) == [[]]

    def test_a_table_may_be_used_while_expired_entries_are_dropped(self, table: StateTable) -> None:
        """Prevents that a batch waits for the whole, and that what it writes meanwhile is lost."""
        table.apply(changes(*[put(1, 0, b"%05d" % i, b"", b"dead") for i in range(5000)]))
        pieces = table.drop_expired(1, {0: lambda value: value == b"dead"})
        dropped = next(pieces)
        assert 0 < dropped < 5000
        table.apply(changes(*[put(1, 0, b"%05d" % i, b"", b"live") for i in range(0, 5000, 2)]))
        with closing(table.snapshot()) as snapshot:
            shown = content(snapshot, [1])
            dropped += sum(pieces)
            assert content(snapshot, [1]) == shown
        with closing(table.snapshot()) as snapshot:
            left = content(snapshot, [1])
        assert set(left.values()) == {b"live"}
        assert len(left) == 2500
        assert dropped < 5000

    def test_expired_entries_are_not_met_by_a_scan_under_way(self, table: StateTable) -> None:
        """Whatever a table remembers of the order from the page before."""
        table.apply(changes(*[put(1, 0, b"k", b"%d" % i, b"dead" if i == 5 else b"live") for i in range(9)]))
        first = table.scan(0, 1, limit=3)
        assert sum(table.drop_expired(1, {0: lambda value: value == b"dead"})) == 1
        rest = table.scan(0, 1, after=first[-1][:2])
        assert [e.user_key for e in [*first, *rest]] == [b"%d" % i for i in range(9) if i != 5]
