"""Base files: what goes in comes out, in any table, and no damage goes unnoticed."""

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
from materializer.bases.key_group_file import KeyGroupFile, decode_key_group, encode_key_group
from materializer.tables import ENTRY_SCHEMA, HeapStateTable, RocksDBOptions, StateTable, open_table
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
    assert files[0].checksum == files[2].checksum == google_crc32c.value(files[0].data)


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
    assert (file.rows, file.blocks, file.raw_bytes) == (0, 0, 0)
    assert list(decode_key_group(file.data, 1)) == []


def test_a_key_group_of_many_pages_is_many_blocks() -> None:
    """Decoding holds one block at a time, so memory is bounded whatever the state holds."""
    rows = [put(1, 0, b"%06d" % i, b"", b"v" * 1000) for i in range(12_000)]
    file = _encoded(*rows)
    assert file.blocks == 3
    pages = list(decode_key_group(file.data, 1))
    assert [page.num_rows for page in pages] == [4169, 4169, 3662]
    assert max(page.nbytes for page in pages) < 5 << 20
    assert len(file.data) * 20 < file.raw_bytes


def test_every_flipped_bit_is_detected(seed: int) -> None:
    """Before the first row is given out."""
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
    """Each block is sound in itself; only the chain of checksums tells."""
    file = _encoded(*[put(1, 0, b"%06d" % i, b"", bytes([i % 7]) * 1000) for i in range(12_000)])
    at, spans = base_file._HEADER.size + 4, []
    while (head := base_file._BLOCK.unpack_from(file.data, at))[0]:
        spans.append(file.data[at : at + 12 + head[2] + 4])
        at += len(spans[-1])
    assert len(spans) == 3
    start, end = file.data[: base_file._HEADER.size + 4], file.data[at:]
    assert start + b"".join(spans) + end == file.data
    for picked in ([0, 1], [1, 2], [0, 1, 1, 2], [1, 0, 2], [0, 2, 1], []):
        with pytest.raises(CorruptData):
            decode_key_group(start + b"".join(spans[i] for i in picked) + end, 1)


def test_another_key_group_is_refused() -> None:
    file = _encoded(put(1, 0, b"a", b"", b"1"))
    with pytest.raises(CorruptData, match="base-7 holds key group 1, not 2"):
        decode_key_group(file.data, 2, name="base-7")


def _forged(rows: int, raw_size: int, stored: bytes) -> bytes:
    """Return a file whose checksums are right and whose one block lies."""
    head = base_file._HEADER.pack(base_file.MAGIC, base_file.FORMAT_VERSION, 0, 1)
    block = base_file._BLOCK.pack(rows, raw_size, len(stored)) + stored
    trailer = base_file._TRAILER.pack(0, 1, rows, raw_size)
    crcs = [struct.pack("<I", google_crc32c.value(part)) for part in (head, head + block, head + block + trailer)]
    return head + crcs[0] + block + crcs[1] + trailer + crcs[2]


def test_a_decompression_bomb_is_refused_before_it_is_unpacked() -> None:
    """8 KB that unpack to 256 MB: the frame's own size is believed by the library, not by us."""
    bomb = zstandard.ZstdCompressor().compress(bytes(256 << 20))
    assert len(bomb) < 32 << 10
    with pytest.raises(CorruptData, match="claims"):
        decode_key_group(_forged(5, 256 << 20, bomb), 1)
    with pytest.raises(CorruptData, match="a frame of 268435456 bytes instead of 100"):
        list(decode_key_group(_forged(5, 100, bomb), 1))


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
    with pytest.raises(CorruptData, match="claims"):
        decode_key_group(_forged(1000, len(raw), stored), 1)
    with pytest.raises(CorruptData, match="damaged"):
        list(decode_key_group(_forged(rows, len(raw), b"no zstd frame"), 1))


def test_a_newer_format_asks_for_an_upgrade() -> None:
    head = base_file._HEADER.pack(base_file.MAGIC, 2, 0, 1)
    data = head + struct.pack("<I", google_crc32c.value(head)) + bytes(64)
    with pytest.raises(Invalid, match=r"format version 2.*upgrade"):
        decode_key_group(data, 1, name="base-7")


@pytest.mark.parametrize("kind", KINDS)
def test_expired_entries_are_left_out(tmp_path: Path, kind: str) -> None:
    """Of the states that have a time to live; the others' values are not even looked at."""

    def is_expired(value: bytes) -> bool:
        assert value in (b"dead", b"live")
        return value == b"dead"

    with closing(_open(kind, tmp_path / "t")) as table:
        rows = [
            put(1, s, b"k%d" % i, u, b"dead" if i % 3 else b"live")
            for s in (4, 5)
            for i in range(30)
            for u in (b"", b"x")
        ]
        table.apply(changes(*rows, put(1, 6, b"k", b"", b"not to be looked at")))
        with closing(table.snapshot()) as snapshot:
            file = encode_key_group(snapshot, 1, expired={5: is_expired})
            assert (file.rows, file.expired) == (60 + 20 + 1, 40)
            left = [row for page in decode_key_group(file.data, 1) for row in page.to_pylist()]
            assert {row["value"] for row in left if row["state"] == 5} == {b"live"}
            assert sum(row["state"] == 4 for row in left) == 60
            everything = encode_key_group(snapshot, 1, expired={s: lambda value: True for s in (4, 5, 6)})
            assert (everything.rows, everything.blocks, everything.expired) == (0, 0, 121)


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
    monkeypatch.setattr(base_file, "MAX_BLOCK_BYTES", largest + 14)
    file = _encoded(put(1, 0, b"k", b"", bytes(largest - 1)))
    assert file.raw_bytes == base_file.MAX_BLOCK_BYTES
    assert next(decode_key_group(file.data, 1)).num_rows == 1
    with pytest.raises(Invalid, match="key group 1 is larger than"):
        _encoded(put(1, 0, b"k", b"", bytes(largest)))
