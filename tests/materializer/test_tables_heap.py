"""The heap table: the contract, and what only it promises."""

import gc
import time
from contextlib import closing
from pathlib import Path

from materializer.bases.key_group_file import decode_key_group, encode_key_group
from materializer.tables import HeapStateTable, StateTable
from materializer.tables.value_slots import ValueSlots
from worlds.table_changes import changes, clear, content, delete, put
from worlds.table_contract import TableContract


class TestHeapStateTable(TableContract):
    def open_table(self, directory: Path) -> StateTable:
        return HeapStateTable()


def _filled(keys: int, groups: int = 128) -> HeapStateTable:
    table = HeapStateTable()
    table.apply(changes(*[put(i % groups, 0, b"%016d" % i, b"", b"v" * 100) for i in range(keys)]))
    return table


def test_a_snapshot_costs_the_same_whatever_the_state_holds() -> None:
    """Two states that differ 50 times in size, in as many groups: the snapshot touches no entry."""
    took = []
    for keys in (2_000, 100_000):
        table = _filled(keys)
        gc.collect()
        best = 1.0
        for _ in range(20):
            start = time.process_time()
            snapshot = table.snapshot()
            best = min(best, time.process_time() - start)
            snapshot.close()
        took.append(best)
    assert took[1] < 10 * took[0] + 1e-3, took
    assert took[1] < 5e-3


def test_a_write_after_a_snapshot_costs_what_it_writes() -> None:
    """No dictionary is copied: changes go to a layer, and are folded in once nobody looks any more."""
    table = _filled(1000, groups=10)
    before = dict(table._states[0])
    snapshot = table.snapshot()
    truth = content(snapshot, range(10))
    gone, kept = b"%016d" % 4, b"%016d" % 14
    table.apply(changes(put(4, 0, b"new", b"", b"1"), delete(4, 0, gone), put(4, 0, kept, b"", b"2")))
    table.apply(changes(put(4, 0, b"brief", b"", b"1")))
    table.apply(changes(delete(4, 0, b"brief")))
    written = table._states[0][4]
    assert {g for g in before if before[g] is not table._states[0][g]} == {4}
    assert written.points is before[4].points, "the base is shared"
    assert written.point_layer == {b"new": b"1", gone: None, kept: b"2"}
    asked = [b"new", gone, kept, b"brief"]
    assert table.get_many(0, [4] * 4, asked) == [b"1", None, b"2", None]
    assert table.get_many(0, [4, 5] * 100, [b"new", b"new"] * 100) == [b"1", None] * 100
    assert content(snapshot, range(10)) == truth
    snapshot.close()
    table.apply(changes(put(4, 0, b"newer", b"", b"1"), put(5, 0, b"new", b"", b"1")))
    assert table._states[0][4] is written
    assert (written.point_layer, written.element_layer) == (None, None), "folded in"
    assert table._states[0][5] is before[5]
    assert table.get_many(0, [4] * 4, asked) == [b"1", None, b"2", None]


def test_closing_the_newer_snapshot_first_keeps_the_older_one_whole() -> None:
    table = _filled(100, groups=2)
    older, newer = table.snapshot(), table.snapshot()
    truth = content(older, [0, 1])
    newer.close()
    table.apply(changes(*[clear(i % 2, 0, b"%016d" % i) for i in range(50)]))
    assert content(older, [0, 1]) == truth
    older.close()


def test_elements_of_unwritten_keys_are_not_copied() -> None:
    """A huge map beside a small one is not copied because the small one changes."""
    table = HeapStateTable()
    table.apply(changes(*[put(0, 0, b"huge", b"%d" % i, b"v") for i in range(1000)], put(0, 0, b"small", b"x", b"1")))
    snapshot = table.snapshot()
    table.apply(changes(put(0, 0, b"small", b"x", b"2")))
    group = table._states[0][0]
    assert group.element_layer == {b"small": {b"x": b"2"}}
    table.apply(changes(put(0, 0, b"huge", b"0", b"2"), clear(0, 0, b"small"), put(0, 0, b"small", b"y", b"3")))
    assert group.elements[b"huge"][b"0"] == b"v"
    assert set(content(snapshot, [0]).values()) == {b"v", b"1"}
    snapshot.close()
    table.apply(changes(put(0, 0, b"huge", b"1", b"2")))
    assert group.element_layer is None
    assert table.get_entries(0, [0], [b"small"]) == [[(b"y", b"3")]]
    assert table.get_entry(0, 0, b"huge", [b"0", b"1", b"2"]) == [b"2", b"2", b"v"]


def test_paging_through_one_huge_map_is_not_quadratic() -> None:
    """100 times the elements take at most about 100 times as long, not 10,000 times."""

    def walk(elements: int) -> float:
        table = HeapStateTable()
        table.apply(changes(*[put(0, 0, b"k", b"%07d" % (i * 7919 % elements), b"") for i in range(elements)]))
        start = time.process_time()
        after, seen = None, 0
        while page := table.scan(0, 0, after=after, limit=10):
            after = page[-1][:2]
            seen += len(page)
        assert seen == elements
        return time.process_time() - start

    small = min(walk(300) for _ in range(3))
    assert walk(30_000) < 100 * small * 6 + 0.2


def test_a_failed_restore_leaves_the_key_group_as_it_was() -> None:
    table = _filled(100, groups=2)
    with closing(table.snapshot()) as snapshot:
        before = content(snapshot, [0, 1])

        def broken():  # type: ignore[no-untyped-def]
            yield next(iter(snapshot.entries(1)))
            raise OSError("the disk is gone")

        try:
            table.restore(0, broken())
        except OSError:
            pass
        else:
            raise AssertionError("the error was swallowed")
    with closing(table.snapshot()) as after:
        assert content(after, [0, 1]) == before


def test_deleted_keys_leave_nothing_behind() -> None:
    """A stream of keys that come and go does not grow the table."""
    table = HeapStateTable()
    for turn in range(50):
        rows = [put(0, 0, b"%d-%d" % (turn, i), b"x" * (i % 2), b"v") for i in range(20)]
        table.apply(changes(*rows))
        table.apply(changes(*[delete(0, 0, r[3], r[4]) for r in rows]))
    group = table._states[0][0]
    assert (group.points, group.elements, table.size().entries) == ({}, {}, 0)


def test_large_values_of_a_base_are_not_copied_and_belong_to_the_table() -> None:
    """A restore is read and written as any other table; what it was made from is not seen again."""
    source = HeapStateTable()
    rows = {b"%04d" % i: b"%0200d" % i for i in range(500)}
    source.apply(changes(*[put(1, 0, key, b"", value) for key, value in rows.items()]))
    data = encode_key_group(source.snapshot(), 1).data
    pages = list(decode_key_group(data, 1))
    first, second = HeapStateTable(), HeapStateTable()
    first.restore(1, pages)
    second.restore(1, decode_key_group(data, 1))
    kept = first._states[0][1].points
    assert isinstance(kept, ValueSlots)
    buffer = pages[0].column("value").buffers()[2]
    assert buffer.address <= kept._values.ctypes.data < buffer.address + buffer.size
    assert first.size() == second.size() == source.size()
    with closing(first.snapshot()) as snapshot:
        first.apply(
            changes(put(1, 0, b"0007", b"", b"x" * 200), delete(1, 0, b"0008"), put(1, 0, b"new", b"", b"y" * 200))
        )
        assert content(snapshot, [1]) == content(source.snapshot(), [1])
    first.apply(changes(put(1, 0, b"0009", b"", b"z" * 200)))
    expected = rows | {b"0007": b"x" * 200, b"new": b"y" * 200, b"0009": b"z" * 200}
    del expected[b"0008"]
    names = [*rows, b"new"]
    assert first.get_many(0, [1] * len(names), names) == [expected.get(name) for name in names]
    assert second.get_many(0, [1] * len(rows), list(rows)) == list(rows.values())
