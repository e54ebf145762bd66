"""Base files: what goes in comes out, in any table, and no damage goes unnoticed."""

import itertools
import random
import struct
from contextlib import closing
from pathlib import Path

import google_crc32c
import hypothesis.strategies as st
import pytest
import zstandard
from hypothesis import given, settings

import materializer.bases.key_group_file as base_file
from dstl.errors import Closed, CorruptData, Invalid
from dstl.options import RocksDBOptions
from materializer.bases import key_group_block
from materializer.bases.key_group_block import KeyGroupBlock
from materializer.bases.key_group_file import KeyGroupFile, decode_key_group, encode_key_group
from materializer.bases.key_group_index import (
    FORMAT_VERSION,
    MAGIC,
    KeyGroupIndex,
    raw_index,
    read_index,
    seal_index,
    tail_bytes,
)
from materializer.tables import ENTRY_SCHEMA, HeapStateTable, StateTable, open_table
from worlds.table_changes import changes, content, put

KINDS = ["heap", "rocksdb"]
SMALL = RocksDBOptions(block_cache_bytes=1 << 20, write_buffer_bytes=1 << 20)


def _open(kind: str, directory: Path) -> StateTable:
    return open_table(kind, directory, rocksdb=SMALL)  # type: ignore[arg-type]


def _encoded(*rows: tuple[int, int, int, bytes, bytes, bytes], group: int = 1) -> KeyGroupFile:
    with closing(HeapStateTable()) as table:
        table.apply(changes(*rows))
        with closing(table.snapshot()) as snapshot:
            return encode_key_group(snapshot, group)


def _index(file: KeyGroupFile, group: int = 1) -> KeyGroupIndex:
    found = read_index(file.data, len(file.data), group, name="base-7")
    assert isinstance(found, KeyGroupIndex)
    return found


def _rows(seed: int, count: int) -> list[tuple[int, int, int, bytes, bytes, bytes]]:
    rng = random.Random(seed)
    return [
        put(
            1,
            rng.choice([0, 3, 65535]),
            rng.randbytes(rng.randrange(9)),
            rng.choice([b"", b"\0", b"u"]),
            rng.randbytes(20),
        )
        for _ in range(count)
    ]


@pytest.mark.parametrize("source", KINDS)
@pytest.mark.parametrize("target", KINDS)
def test_a_base_of_one_table_restores_into_the_other(tmp_path: Path, seed: int, source: str, target: str) -> None:
    with closing(_open(source, tmp_path / "a")) as one, closing(_open(target, tmp_path / "b")) as other:
        one.apply(changes(*_rows(seed, 3000)))
        with closing(one.snapshot()) as snapshot:
            truth = content(snapshot, [1])
            file = encode_key_group(snapshot, 1)
        assert (file.rows, file.expired) == (len(truth), 0)
        other.restore(1, decode_key_group(file.data, 1))
        with closing(other.snapshot()) as restored:
            assert content(restored, [1]) == truth


def test_equal_content_is_equal_bytes_whatever_the_table_and_the_history(tmp_path: Path, seed: int) -> None:
    """So a savepoint is canonical, and an unchanged key group has the checksum that it had."""
    rows = _rows(seed, 2000)
    files = []
    for turn, kind in enumerate([*KINDS, "heap"]):
        final = {(r[1], r[3], r[4]): r for r in rows}
        history = list(final.values())
        random.Random(turn).shuffle(history)
        with closing(_open(kind, tmp_path / str(turn))) as table:
            if turn == 2:
                table.apply(changes(*[(*r[:5], b"overwritten later") for r in rows]))
            table.apply(changes(*history))
            with closing(table.snapshot()) as snapshot:
                files.append(encode_key_group(snapshot, 1))
    assert files[0].data == files[1].data == files[2].data


@settings(deadline=None, max_examples=60)
@given(
    rows=st.dictionaries(
        st.tuples(st.integers(0, 65535), st.binary(max_size=20), st.binary(max_size=10)),
        st.binary(max_size=60),
        max_size=40,
    )
)
def test_any_content_comes_back(rows: dict[tuple[int, bytes, bytes], bytes]) -> None:
    file = _encoded(*[put(1, s, k, u, v) for (s, k, u), v in rows.items()])
    pages = list(decode_key_group(file.data, 1))
    assert [tuple(row.values()) for page in pages for row in page.to_pylist()] == sorted(
        (*a, v) for a, v in rows.items()
    )
    for page in pages:
        page.validate(full=True)
        assert page.schema.equals(ENTRY_SCHEMA)
    assert file.rows == len(rows)


def test_an_empty_key_group_is_a_file_without_blocks() -> None:
    file = _encoded(put(2, 0, b"elsewhere", b"", b""))
    assert (file.rows, file.raw_bytes) == (0, 0)
    assert list(decode_key_group(file.data, 1)) == []


@pytest.mark.parametrize("frame_bytes", [16, key_group_block.FRAME_BYTES])
def test_every_flipped_bit_is_detected(frame_bytes: int, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the first row is given out."""
    monkeypatch.setattr(key_group_block, "FRAME_BYTES", frame_bytes)
    file = _encoded(*_rows(seed, 12))
    for at in range(len(file.data)):
        for bit in range(8):
            damaged = bytearray(file.data)
            damaged[at] ^= 1 << bit
            with pytest.raises((CorruptData, Invalid)):
                decode_key_group(bytes(damaged), 1, name="base-7")


def test_every_truncation_and_every_addition_is_detected(seed: int) -> None:
    file = _encoded(*_rows(seed, 12))
    for length in range(len(file.data)):
        with pytest.raises(CorruptData, match=r"base-7 is damaged: .*; restore from an older base"):
            decode_key_group(file.data[:length], 1, name="base-7")
    for more in (b"\0", file.data[-4:], file.data):
        with pytest.raises(CorruptData):
            decode_key_group(file.data + more, 1)


def test_blocks_cannot_be_lost_doubled_or_moved() -> None:
    """Each block is sound in itself; only the index tells where it belongs."""
    file = _encoded(*[put(1, 0, b"%06d" % i, b"", bytes([i % 7]) * 1000) for i in range(700)])
    starts = _index(file).starts
    spans = [file.data[start:stop] for start, stop in itertools.pairwise(starts)]
    assert len(spans) == 3
    start, end = file.data[: starts[0]], file.data[starts[-1] :]
    assert start + b"".join(spans) + end == file.data
    for picked in ([0, 1], [1, 2], [0, 1, 1, 2], [1, 0, 2], [0, 2, 1], []):
        with pytest.raises(CorruptData):
            decode_key_group(start + b"".join(spans[i] for i in picked) + end, 1)


def test_an_index_is_read_from_the_end_of_a_file_and_says_how_much_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base_file, "BLOCK_BYTES", 100)
    file = _encoded(*[put(1, 0, b"%06d" % i, b"", b"v" * 40) for i in range(3000)])
    size = len(file.data)
    needed = read_index(file.data[-100:], size, 1, name="base-7")
    assert isinstance(needed, int)
    assert read_index(file.data[-needed:], size, 1, name="base-7") == _index(file)
    for length in (size - 1, size + 1):
        with pytest.raises(CorruptData, match="does not describe it"):
            read_index(file.data[-needed:], length, 1, name="base-7")
    assert tail_bytes(size) <= size


def test_an_index_has_mostly_less_than_what_is_read_for_it() -> None:
    for width in (20, 1000):
        rows = [put(1, 0, b"%016d" % (i * 2654435761 % (1 << 32)), b"", b"v" * width) for i in range(600_000 // width)]
        file = _encoded(*rows)
        assert isinstance(
            read_index(file.data[-tail_bytes(len(file.data)) :], len(file.data), 1, name="b"), KeyGroupIndex
        )


def test_a_damaged_block_is_found_without_the_others() -> None:
    file = _encoded(*[put(1, 0, b"%06d" % i, b"", b"v" * 1000) for i in range(700)])
    index = _index(file)
    start, stop = index.starts[1:3]
    part = bytearray(file.data[start:stop])
    index.check(range(1, 2), memoryview(part))
    part[7] ^= 1
    with pytest.raises(CorruptData, match="base-7 is damaged: block 1 of 3 fails its checksum"):
        index.check(range(1, 2), memoryview(part))


def test_another_key_group_is_refused() -> None:
    file = _encoded(put(1, 0, b"a", b"", b"1"))
    with pytest.raises(CorruptData, match="base-7 holds key group 1, not 2"):
        decode_key_group(file.data, 2, name="base-7")


def _forged(rows: int, raw_size: int, stored: bytes, version: int = FORMAT_VERSION) -> bytes:
    """Return a file whose checksums are right and whose one block, all of it keys, lies."""
    block = KeyGroupBlock(rows, max(0, raw_size - 14 * rows), 0, 0, len(stored), 0, google_crc32c.value(stored))
    raw = raw_index([block], [(0, b"")])
    end = seal_index(zstandard.ZstdCompressor().compress(raw), 1, 1, rows, block.head, len(raw), version=version)
    return b"".join((MAGIC, stored, *end))


@pytest.mark.parametrize(
    ("rows", "raw"),
    [
        (1, struct.pack("<HIII", 0, 1, 0, 0)),
        (1, struct.pack("<HIII", 0, 0, 0, 0) + b"more"),
        (1, struct.pack("<HIII", 0, 0xFFFFFFFF, 0, 0xFFFFFFFF)),
    ],
)
def test_lengths_that_do_not_add_up_are_refused(rows: int, raw: bytes) -> None:
    stored = zstandard.ZstdCompressor().compress(raw)
    with pytest.raises(CorruptData, match="lengths do not add up"):
        list(decode_key_group(_forged(rows, len(raw), stored), 1))
    with pytest.raises(CorruptData, match="a frame of"):
        list(decode_key_group(_forged(1000, len(raw), stored), 1))
    with pytest.raises(CorruptData, match="claim"):
        decode_key_group(_forged(0, len(raw), stored), 1)
    with pytest.raises(CorruptData, match="damaged"):
        list(decode_key_group(_forged(rows, len(raw), b"no zstd frame"), 1))


def test_a_newer_format_asks_for_an_upgrade() -> None:
    data = _forged(1, 15, b"whatever", version=2)
    with pytest.raises(Invalid, match=r"format version 2.*upgrade"):
        decode_key_group(data, 1, name="base-7")


def test_a_closed_snapshot_is_not_encoded() -> None:
    with closing(HeapStateTable()) as table:
        table.apply(changes(put(1, 0, b"a", b"", b"1")))
        snapshot = table.snapshot()
        snapshot.close()
        with pytest.raises(Closed):
            encode_key_group(snapshot, 1)


def test_the_largest_change_fits_and_a_larger_one_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    largest = 1 << 16
    monkeypatch.setattr(base_file, "MAX_CHANGE_BYTES", largest)
    monkeypatch.setattr(base_file, "MAX_BLOCK_BYTES", largest + 14 + 4)
    file = _encoded(put(1, 0, b"k", b"", bytes(largest - 1)))
    assert file.raw_bytes == base_file.MAX_BLOCK_BYTES
    assert next(decode_key_group(file.data, 1)).num_rows == 1
    with pytest.raises(Invalid, match="key group 1 is larger than"):
        _encoded(put(1, 0, b"k", b"", bytes(largest)))
