"""The contract of a state table, as tests: subclass :class:`TableContract`, say how a table is opened, run
pytest.

::

    class TestMyTable(TableContract):
        def open_table(self, directory: Path) -> StateTable:
            return MyTable(directory)
"""

from __future__ import annotations

import random
from pathlib import Path

import pyarrow as pa
import pytest

from dstl.changelog.change_set import OP_META
from dstl.errors import Closed, Invalid
from materializer.tables import HeapStateTable
from materializer.tables.base import StateTable
from worlds.table_changes import AWKWARD, Change, changes, clear, delete, put
from worlds.table_snapshot_contract import TableSnapshotContract


def _group_of(key: bytes) -> int:
    """Return a key group for a key: one of sixteen."""
    return sum(key) % 16


class TableContract(TableSnapshotContract):
    """The contract of :class:`materializer.tables.base.StateTable`. Each test opens tables of its own."""

    def test_an_empty_table_has_nothing(self, table: StateTable) -> None:
        """Reads of what was never written."""
        assert table.get_many(0, [], []) == []
        assert table.get_many(0, [1, 2, 1], [b"a", b"b", b"a"]) == [None, None, None]
        assert table.get_entries(7, [1], [b"a"]) == [[]]
        assert table.get_entry(7, 1, b"a", [b"", b"x"]) == [None, None]
        assert table.scan(0, 0) == []
        assert list(table.key_groups()) == []
        assert table.version(3) == 0
        assert (table.size().entries, table.size().bytes) == (0, 0)

    def test_values_are_found_by_state_group_and_key(self, table: StateTable) -> None:
        """The three parts of an address do not run into each other."""
        rows = [
            put(g, s, k, b"", b"%d-%d-" % (g, s) + k)
            for g in (0, 1, 255, 32767)
            for s in (0, 1, 65535)
            for k in AWKWARD
        ]
        table.apply(changes(*rows))
        for g in (0, 1, 255, 32767):
            for s in (0, 1, 65535):
                assert table.get_many(s, [g] * len(AWKWARD), AWKWARD) == [b"%d-%d-" % (g, s) + k for k in AWKWARD]
        assert table.get_many(2, [0], [b"a"]) == [None]
        assert table.get_many(0, [2], [b"a"]) == [None]
        assert list(table.key_groups()) == [0, 1, 255, 32767]

    @pytest.mark.parametrize("shuffled", [False, True])
    def test_get_many_answers_in_the_order_of_the_question(self, table: StateTable, seed: int, shuffled: bool) -> None:
        """Many key groups, sorted and scattered, with repeats and absent keys."""
        rng = random.Random(seed)
        truth = {b"k%d" % i: (i % 16, b"v%d" % i) for i in range(500)}
        table.apply(changes(*[put(g, 3, k, b"", v) for k, (g, v) in truth.items()]))
        asked = [rng.choice([*truth, b"absent"]) for _ in range(1000)]
        if not shuffled:
            asked.sort(key=lambda key: truth.get(key, (0, b""))[0])
        groups = [truth.get(key, (5, b""))[0] for key in asked]
        assert table.get_many(3, groups, asked) == [truth[key][1] if key in truth else None for key in asked]

    @pytest.mark.parametrize("width", [None, 1, 17])
    def test_get_values_answers_as_get_many(self, table: StateTable, seed: int, width: int | None) -> None:
        """Values of one length and of several, in a table that is new, changed, and changed beside a snapshot."""
        rng = random.Random(seed)
        names = [b"k%d" % i for i in range(300)]
        asked = sorted((*names, *(b"absent%d" % i for i in range(50))), key=lambda key: (_group_of(key), rng.random()))
        groups = [_group_of(key) for key in asked]

        def agree() -> None:
            found = table.get_values(3, groups, pa.array(asked, pa.binary()))
            found.validate(full=True)
            assert found.to_pylist() == table.get_many(3, groups, asked)

        agree()
        snapshots = []
        for turn in range(6):
            named = rng.sample(names, 120)
            puts = [put(_group_of(k), 3, k, b"", rng.randbytes(width or rng.randrange(9))) for k in named[20:]]
            deletes = [delete(_group_of(k), 3, k) for k in named[:20]]
            for rows in (puts, deletes) if turn % 2 else ([*puts, *deletes],):
                table.apply(changes(*sorted(rows, key=lambda row: row[0])))
            agree()
            if turn == 2:
                snapshots.append(table.snapshot())
            elif snapshots and turn == 4:
                snapshots.pop().close()

    def test_one_key_group_for_each_key(self, table: StateTable) -> None:
        """A shorter list of key groups is refused, not guessed at."""
        with pytest.raises(Invalid, match="2 key groups for 1 keys"):
            table.get_many(0, [1, 2], [b"a"])
        with pytest.raises(Invalid, match="1 key groups for 2 keys"):
            table.get_entries(0, [1], [b"a", b"b"])
        with pytest.raises(Invalid, match="2 key groups for 1 keys"):
            table.get_values(0, [1, 2], pa.array([b"a"], pa.binary()))

    def test_scattered_changes_keep_the_order_within_a_key(self, table: StateTable, seed: int) -> None:
        """Hundreds of owners in one batch, without any order among them."""
        rng = random.Random(seed)
        truth: dict[tuple[int, int, bytes], bytes] = {}
        rows: list[Change] = []
        for i in range(3000):
            owner = (rng.randrange(64), rng.randrange(4), b"k%d" % rng.randrange(3))
            if rng.random() < 0.2:
                rows.append(delete(*owner))
                truth.pop(owner, None)
            else:
                rows.append(put(*owner, b"", b"%d" % i))
                truth[owner] = b"%d" % i
        table.apply(changes(*rows))
        for group, state, key in {(r[0], r[1], r[3]) for r in rows}:
            assert table.get_many(state, [group], [key]) == [truth.get((group, state, key))]

    def test_clear_takes_one_key_whole(self, table: StateTable) -> None:
        """All user keys, also those put earlier in the same batch; neighbours and later puts stay."""
        table.apply(changes(*[put(1, 0, k, u, b"old") for k in AWKWARD for u in (b"", b"\0", b"x")]))
        table.apply(changes(put(1, 0, b"a", b"new before", b"1"), clear(1, 0, b"a"), put(1, 0, b"a", b"after", b"2")))
        table.apply(changes(clear(1, 0, b"never there"), clear(9, 9, b"")))
        assert table.get_entries(0, [1], [b"a"]) == [[(b"after", b"2")]]
        for key in AWKWARD:
            if key != b"a":
                assert len(table.get_entries(0, [1], [key])[0]) == 3, key

    def test_clear_takes_what_stands_before_it_behind_another_owner(self, table: StateTable) -> None:
        """The puts and the clear of one key are not neighbours in the batch."""
        table.apply(
            changes(
                put(1, 0, b"a", b"x", b"gone"),
                put(2, 0, b"a", b"x", b"stays"),
                clear(1, 0, b"a"),
                put(2, 0, b"a", b"y", b"stays"),
                put(1, 0, b"a", b"z", b"stays"),
            )
        )
        assert table.get_entries(0, [1, 2], [b"a", b"a"]) == [[(b"z", b"stays")], [(b"x", b"stays"), (b"y", b"stays")]]

    def test_a_refused_batch_changes_nothing(self, table: StateTable) -> None:
        """Metadata never reaches a table, and what stood before it in the batch is not applied either."""
        with pytest.raises(Invalid, match="no operation 3"):
            table.apply(changes(put(1, 0, b"a", b"", b"1"), (0xFFFF, 0, OP_META, b"", b"", b"schema")))
        assert table.get_many(0, [1], [b"a"]) == [None]
        table.apply(changes())
        assert list(table.key_groups()) == []

    def test_scan_stops_before_a_key(self, table: StateTable) -> None:
        """``before_key`` is exclusive; timers that are due are read with it."""
        table.apply(changes(*[put(0, 1, t.to_bytes(8, "big"), u, b"") for t in range(300) for u in (b"p", b"q")]))
        due = table.scan(1, 0, before_key=(255).to_bytes(8, "big"))
        assert [int.from_bytes(e.key, "big") for e in due] == [t for t in range(255) for _ in "pq"]
        assert table.scan(1, 0, before_key=b"") == []
        assert len(table.scan(1, 0, after=((253).to_bytes(8, "big"), b"p"), before_key=(255).to_bytes(8, "big"))) == 3

    def test_scan_sees_changes_between_pages(self, table: StateTable) -> None:
        """Untouched entries appear exactly once although others come and go; the last one seen may be
        gone."""
        table.apply(changes(*[put(0, 0, b"k%02d" % i, b"", b"") for i in range(20)]))
        first = table.scan(0, 0, limit=5)
        table.apply(
            changes(
                delete(0, 0, b"k04"), delete(0, 0, b"k10"), put(0, 0, b"k00a", b"", b""), put(0, 0, b"k12a", b"", b"")
            )
        )
        rest = table.scan(0, 0, after=first[-1][:2])
        assert [e.key for e in first] == [b"k%02d" % i for i in range(5)]
        assert [e.key for e in rest] == sorted([b"k%02d" % i for i in range(5, 20) if i != 10] + [b"k12a"])

    def test_size_follows_the_content(self, table: StateTable) -> None:
        """Exact in memory, and of the right magnitude where it is the engine's estimate."""
        table.apply(changes(*[put(1, 0, b"key-%06d" % i, b"", b"v" * 90) for i in range(5000)]))
        size = table.size()
        if isinstance(table, HeapStateTable):
            assert (size.entries, size.bytes) == (5000, 5000 * 100)
            table.apply(
                changes(put(1, 0, b"key-000000", b"", b""), delete(1, 0, b"key-000001"), put(1, 0, b"m", b"uu", b"vvv"))
            )
            assert (table.size().entries, table.size().bytes) == (5000, 4999 * 100 - 90 + 6)
            table.apply(changes(clear(1, 0, b"m"), clear(1, 0, b"key-000002")))
            assert sum(table.drop_expired(1, {0: lambda value: value == b""})) == 1
            assert (table.size().entries, table.size().bytes) == (4997, 4997 * 100)
        else:
            assert 2500 <= size.entries <= 10000
            assert 50_000 <= size.bytes <= 2_000_000
        table.drop_key_group(1)
        assert list(table.key_groups()) == []

    def test_a_closed_table_is_not_used(self, tmp_path: Path) -> None:
        """Every call says so; closing twice is harmless."""
        table = self.open_table(tmp_path / "table")
        table.apply(changes(put(1, 0, b"a", b"", b"1")))
        table.close()
        table.close()
        for call in (
            lambda: table.get_many(0, [1], [b"a"]),
            lambda: table.get_entries(0, [1], [b"a"]),
            lambda: table.get_entry(0, 1, b"a", [b""]),
            lambda: table.scan(0, 1),
            lambda: table.apply(changes(put(1, 0, b"a", b"", b"1"))),
            lambda: table.restore(1, []),
            lambda: table.drop_key_group(1),
            lambda: table.drop_expired(1, {}),
            table.snapshot,
        ):
            with pytest.raises(Closed, match="state table was closed"):
                call()
