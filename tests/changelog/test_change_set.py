import random

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dstl.changelog import change_set as module
from dstl.changelog.change_set import CHANGE_SCHEMA, META_KEY_GROUP, OP_META, OP_PUT, ChangeSet, digest_changes
from dstl.errors import Invalid
from worlds.segment_samples import Row, batch_of, random_rows, rows_of

ROWS = st.lists(
    st.tuples(
        st.integers(0, 32767),
        st.integers(0, 65535),
        st.integers(0, 2),
        st.binary(max_size=9),
        st.binary(max_size=3),
        st.binary(max_size=20),
    ),
    min_size=1,
    max_size=12,
)


@given(st.lists(ROWS, max_size=5))
def test_batches_keep_the_order_of_their_appends(parts: list[list[Row]]) -> None:
    changes = ChangeSet()
    appended: list[Row] = []
    for rows in parts:
        changes.append_batch(batch_of(rows))
        appended += rows
        assert changes.num_changes == len(appended)
        assert changes.nbytes == sum(5 + sum(map(len, row[3:])) for row in appended)
    assert changes.is_empty == (not appended)
    assert [row for batch in changes.batches() for row in rows_of(batch)] == appended


def rows_in(changes: ChangeSet) -> list[Row]:
    return [row for batch in changes.batches() for row in rows_of(batch)]


def test_reading_does_not_disturb_later_appends() -> None:
    changes = ChangeSet()
    changes.append_batch(batch_of([(1, 0, OP_PUT, b"a", b"", b"1")]))
    assert len(rows_in(changes)) == 1
    changes.append_batch(batch_of([(0, 0, OP_PUT, b"b", b"", b"2")]))
    assert [row[3] for row in rows_in(changes)] == [b"a", b"b"]


def test_metadata_has_its_own_key_group_however_it_is_appended() -> None:
    changes = ChangeSet()
    changes.append_metadata(b"one")
    changes.append_batch(batch_of([(5, 0, OP_META, b"", b"", b"two")]))
    changes.append_batch(batch_of([(5, 0, OP_META, b"", b"", b"three"), (6, 0, OP_PUT, b"k", b"", b"v")]))
    assert [(row[0], row[5]) for row in rows_in(changes)] == [
        (META_KEY_GROUP, b"one"),
        (META_KEY_GROUP, b"two"),
        (META_KEY_GROUP, b"three"),
        (6, b"v"),
    ]


def test_metadata_that_is_not_bytes_is_refused_at_once_and_leaves_nothing() -> None:
    changes = ChangeSet()
    for blob in ("text", bytearray(b"blob"), None):
        with pytest.raises(Invalid, match="not bytes"):
            changes.append_metadata(blob)  # type: ignore[arg-type]
    assert changes.is_empty
    assert changes.nbytes == 0


def bad_batches() -> dict[str, pa.RecordBatch]:
    good = batch_of([(1, 0, OP_PUT, b"k", b"", b"v")])
    nullable = pa.schema([field.with_nullable(True) for field in CHANGE_SCHEMA])
    null = pa.RecordBatch.from_arrays([*good.columns[:5], pa.array([None], pa.binary())], schema=nullable)
    offsets = pa.py_buffer(b"".join(each.to_bytes(4, "little") for each in (0, 5, 1)))
    backwards = pa.Array.from_buffers(pa.binary(), 2, [None, offsets, pa.py_buffer(b"abcdef")])
    two = batch_of([(1, 0, OP_PUT, b"k", b"", b"v")] * 2)
    return {
        "order of columns": good.select(list(reversed(good.schema.names))),
        "type": good.set_column(5, "value", pa.array(["v"])),
        "null": null,
        "key group": batch_of([(32768, 0, OP_PUT, b"", b"", b"")]),
        "op": batch_of([(0, 0, 4, b"", b"", b"")]),
        "offsets": pa.RecordBatch.from_arrays([*two.columns[:5], backwards], schema=CHANGE_SCHEMA),
    }


@pytest.mark.parametrize("what", sorted(bad_batches()))
def test_a_bad_batch_is_refused_at_once_and_leaves_nothing(what: str) -> None:
    changes = ChangeSet()
    with pytest.raises(Invalid):
        changes.append_batch(bad_batches()[what])
    assert changes.is_empty


def test_a_change_that_no_decoder_would_take_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_CHANGE_BYTES", 100)
    changes = ChangeSet()
    changes.append_batch(batch_of([(0, 0, OP_PUT, b"k", b"", b"v" * 99)] * 4))
    with pytest.raises(Invalid, match="split the value"):
        changes.append_metadata(b"v" * 101)
    with pytest.raises(Invalid, match="split the value"):
        changes.append_batch(batch_of([(0, 0, OP_PUT, b"k", b"", b"v" * 100)]))
    assert changes.num_changes == 4


def test_a_slice_of_a_larger_batch_counts_only_its_own_bytes(seed: int) -> None:
    rows = random_rows(random.Random(seed), 50)
    changes = ChangeSet()
    changes.append_batch(batch_of(rows).slice(10, 20))
    assert changes.nbytes == sum(5 + sum(map(len, row[3:])) for row in rows[10:30])
    assert [row for batch in changes.batches() for row in rows_of(batch)] == rows[10:30]


def test_an_empty_batch_is_nothing() -> None:
    changes = ChangeSet()
    changes.append_batch(batch_of([(0, 0, OP_PUT, b"", b"", b"")]).slice(0, 0))
    assert changes.is_empty
    assert changes.batches() == []


def digest(rows: list[Row], rng: random.Random | None = None) -> bytes:
    """Of the changes as they are; with ``rng`` in another order, in parts and as slices of larger batches."""
    made, at = list[pa.RecordBatch](), 0
    rows = list(rows)
    if rng is not None:
        rng.shuffle(rows)
    whole = batch_of(rows)
    while at < len(rows):
        stop = len(rows) if rng is None else rng.randrange(at, len(rows)) + 1
        made.append(whole.slice(at, stop - at))
        at = stop
    return digest_changes(made)


def changes(rng: random.Random) -> list[Row]:
    """Many lengths: none, of one width, and long ones."""
    widths = rng.choice([[0], [8], [11], [28], [*range(40)], [0, 3, 2000], [1024, 1025]])

    def some() -> bytes:
        return rng.randbytes(rng.choice(widths))

    return [
        (rng.randrange(128), rng.randrange(3), rng.randrange(2), b"%d" % i + some(), some(), some())
        for i in range(rng.randrange(1, 60))
    ]


def test_the_order_of_changes_and_the_parts_they_come_in_do_not_matter(rng: random.Random) -> None:
    for _ in range(100):
        rows = changes(rng)
        assert {digest(rows, rng) for _ in range(5)} == {digest(rows)}


def test_any_difference_shows(rng: random.Random) -> None:
    for _ in range(300):
        rows = changes(rng)
        at, field = rng.randrange(len(rows)), rng.randrange(6)
        other: list = [*rows[at]]
        if field < 3:
            other[field] += 1
        else:
            flipped = bytearray(other[field])
            if flipped and rng.random() < 0.7:
                flipped[rng.randrange(len(flipped))] ^= 1 << rng.randrange(8)
            else:
                flipped += b"\0"
            other[field] = bytes(flipped)
        assert digest([*rows[:at], tuple(other), *rows[at + 1 :]]) != digest(rows)  # type: ignore[list-item]
        assert digest([*rows, rows[at]]) != digest(rows)
        assert len(rows) == 1 or digest(rows[:-1]) != digest(rows)


@pytest.mark.parametrize("width", [1, 4, 7, 8, 9, 16, 40])
def test_values_that_change_places_show(width: int) -> None:
    one, two = b"1" * width, b"2" * width
    there = [(1, 0, 0, b"a", b"", one), (1, 0, 0, b"b", b"", two)]
    swapped = [(1, 0, 0, b"a", b"", two), (1, 0, 0, b"b", b"", one)]
    moved = [(1, 0, 0, b"a" + one, b"", b""), (1, 0, 0, b"b", two, b"")]
    assert len({digest(each) for each in (there, swapped, moved)}) == 3


def test_many_small_differences_all_show() -> None:
    rows = [(3, 1, 0, i.to_bytes(8, "little"), b"", b"") for i in range(2_000)]
    assert len({digest([row]) for row in rows}) == len(rows)
    # Neighbouring numbers in pairs of equal sums.
    pairs = {digest([rows[i], rows[1000 - i]]) for i in range(500)}
    assert len(pairs) == 500
