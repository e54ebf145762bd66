"""Equal changes have one digest, other changes another."""

import random

import pyarrow as pa
import pytest

from dstl.changelog.change_set import CHANGE_SCHEMA, digest_changes

Change = tuple[int, int, int, bytes, bytes, bytes]


def batch_of(rows: list[Change]) -> pa.RecordBatch:
    columns = [
        pa.array(column, field.type) for column, field in zip(zip(*rows, strict=True), CHANGE_SCHEMA, strict=True)
    ]
    return pa.RecordBatch.from_arrays(columns, schema=CHANGE_SCHEMA)


def digest(rows: list[Change], rng: random.Random | None = None) -> bytes:
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


def changes(rng: random.Random) -> list[Change]:
    """Many lengths: none, of one width, and long ones."""
    widths = rng.choice([[0], [8], [11], [28], [*range(40)], [0, 3, 2000], [1024, 1025]])

    def some() -> bytes:
        return rng.randbytes(rng.choice(widths))

    return [
        (rng.randrange(128), rng.randrange(3), rng.randrange(2), b"%d" % i + some(), some(), some())
        for i in range(rng.randrange(1, 60))
    ]


def test_the_order_of_changes_and_the_parts_they_come_in_do_not_matter(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(100):
        rows = changes(rng)
        assert {digest(rows, rng) for _ in range(5)} == {digest(rows)}


def test_any_difference_shows(seed: int) -> None:
    rng = random.Random(seed)
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
