"""Every flipped bit and every truncation is found before a change is seen, by both readers; so are lies under a good
checksum."""

import random
import struct
import tracemalloc
from collections import Counter
from collections.abc import Sequence

import google_crc32c
import numpy as np
import pytest

from dstl.changelog.change_set import META_KEY_GROUP, OP_PUT, ChangeSet
from dstl.changelog.segment import encoder as segment_encoder
from dstl.changelog.segment.block_codec import RUN
from dstl.changelog.segment.encoder import encode_segment, segment_checksum
from dstl.changelog.segment.index import (
    CODEC_STORED,
    CODEC_ZSTD,
    BlockEntry,
    BlockTable,
    LogIndex,
    pack_footer,
    pack_header,
    pack_trailer,
)
from dstl.changelog.segment.reader import ReadSizes, SegmentReader, decode_segment, parse_index
from dstl.errors import CorruptData, Invalid
from dstl.store.memory import MemoryStore
from handles.segment_handle import SegmentHandle, SequenceNumberRange
from worlds.segment_samples import batch_of, change_set, decoded, feature_sets, random_rows


def small_segment() -> bytes:
    compressed = ChangeSet()
    compressed.append_batch(batch_of([(9, 0, OP_PUT, b"key", b"", b"compresses well")] * 30))
    return encode_segment([*feature_sets(), ("log-d", 0, compressed)], writer_id="w", metadata={"query": "q"})


def test_the_sample_has_stored_and_compressed_blocks() -> None:
    codecs = {block.codec for log in parse_index(small_segment(), "x").logs for block in log.blocks}
    assert codecs == {CODEC_STORED, CODEC_ZSTD}


def test_every_flipped_bit_is_found_before_a_change_is_seen() -> None:
    data = small_segment()
    for bit in range(8 * len(data)):
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(CorruptData):
            next(decode_segment(bytes(damaged), "x"))


def test_every_truncation_is_found_before_a_change_is_seen() -> None:
    data = small_segment()
    for length in range(len(data)):
        for part in (data[:length], data[len(data) - length :]):
            with pytest.raises(CorruptData):
                next(decode_segment(part, "x"))


def test_bytes_before_or_after_a_segment_are_found() -> None:
    data = small_segment()
    for wrong in (data + b"\0", b"\0" + data, data + data):
        with pytest.raises(CorruptData):
            next(decode_segment(wrong, "x"))


RANGED = ReadSizes(whole=0, tail=64, gap=0, unit=0)
"""Asks by ranges even for a small segment, and joins nothing that is not adjacent."""


async def read_all(store: MemoryStore, handle: SegmentHandle, sizes: ReadSizes) -> list[object]:
    return [changes async for changes in SegmentReader(store, handle, sizes=sizes).read()]


async def test_a_flipped_bit_of_every_byte_that_a_reader_by_range_meets_is_found(seed: int) -> None:
    """One of each byte, drawn: what no checksum covers is found by any of them."""
    rng, data = random.Random(seed), small_segment()
    whole = Counter((log_id, row[0]) for (log_id, *_), rows in decoded(data).items() for row in rows)
    handle = SegmentHandle("s", len(data), segment_checksum(data))
    for bit in (8 * at + rng.randrange(8) for at in range(len(data))):
        store = MemoryStore()
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << bit % 8
        await store.put("s", bytes(damaged))
        seen: Counter[tuple[str, int]] = Counter()
        try:
            async for log_id, batch, _ in SegmentReader(store, handle, sizes=RANGED).read():
                seen.update((log_id, key_group) for key_group in batch.column(0).to_pylist())
            assert bit < 8 * 16  # only the header is never fetched
        except CorruptData:
            assert bit >= 8 * 16
        assert seen <= whole


async def test_every_truncated_object_is_found_by_the_reader() -> None:
    data = small_segment()
    handle = SegmentHandle("s", len(data), segment_checksum(data))
    for length in range(1, len(data)):
        store = MemoryStore()
        await store.put("s", data[:length])
        with pytest.raises(CorruptData):
            await read_all(store, handle, RANGED)


async def test_a_small_segment_must_have_its_handles_checksum() -> None:
    store = MemoryStore()
    data = small_segment()
    await store.put("s", data)
    with pytest.raises(CorruptData, match="handle"):
        await read_all(store, SegmentHandle("s", len(data), segment_checksum(data) ^ 1), ReadSizes())


# What follows is under good checksums: a faulty or hostile writer.


def forged(raw: bytes, entry: dict[str, int] | None = None, stored: bytes | None = None, sqns: int = 1) -> bytes:
    """A segment of one block whose every checksum is right."""
    stored = raw if stored is None else stored
    fields = {"records": 1, "raw_length": len(raw), "codec": CODEC_STORED, "first": 3, "last": 3, "from": 0, "to": 1}
    fields |= entry or {}
    block = BlockEntry(
        *(fields["first"], fields["last"], SequenceNumberRange(fields["from"], fields["to"]), fields["records"], 16),
        *(len(stored), fields["raw_length"], google_crc32c.value(stored), fields["codec"]),
    )
    log = LogIndex("a", SequenceNumberRange(0, sqns), BlockTable.of([block], 0))
    footer = pack_footer("w", {}, [log])
    return pack_header() + stored + footer + pack_trailer(footer)


def raw_block(
    runs: Sequence[tuple[int, int, int]] = ((3, 0, 1),),
    numbers: bytes = b"\0\0\0" + b"\0\0",
    columns: bytes = (b"\0" + struct.pack("<I", 0)) * 3,
) -> bytes:
    return struct.pack("<I", len(runs)) + np.array(list(runs), RUN).tobytes() + numbers + columns


FIXED = b"\0" + struct.pack("<I", 0)


def test_the_forger_can_write_a_good_block() -> None:
    assert decoded(forged(raw_block())) == {("a", 0, 3): [(3, 0, 0, b"", b"", b"")]}


@pytest.mark.parametrize(
    ("raw", "entry"),
    {
        "no runs": (raw_block([]), {}),
        "empty run": (raw_block([(3, 0, 0), (3, 0, 1)]), {}),
        "more changes than runs": (raw_block(), {"records": 2}),
        "runs whose sum wraps": (raw_block([(3, 0, 0xFFFFFFFF), (4, 0, 2)]), {"last": 4}),
        "runs out of order": (raw_block([(4, 0, 1), (3, 0, 1)]), {"records": 2, "last": 4}),
        "key group not in the index": (raw_block([(4, 0, 1)]), {}),
        "number not in the index": (raw_block([(3, 1, 1)]), {}),
        "more runs than bytes": (struct.pack("<I", 1 << 20) + bytes(40), {"records": 1 << 20}),
        "unknown op": (raw_block(numbers=b"\0\0\0" + b"\0\4"), {}),
        "metadata among data": (raw_block(numbers=b"\0\0\0" + b"\0\3"), {}),
        "data among metadata": (raw_block([(META_KEY_GROUP, 0, 1)]), {"first": META_KEY_GROUP, "last": META_KEY_GROUP}),
        "unknown encoding of numbers": (raw_block(numbers=b"\7\0\0" + b"\0\0"), {}),
        "unknown encoding of values": (raw_block(columns=b"\7" + FIXED[1:] + FIXED * 2), {}),
        "unknown width of lengths": (raw_block(columns=b"\1\3\0" + FIXED * 2), {}),
        "value beyond the end": (raw_block(columns=b"\0" + struct.pack("<I", 9) + FIXED * 2), {}),
        "values of 4 GiB each": (raw_block(columns=b"\0" + struct.pack("<I", 0xFFFFFFFF) + FIXED * 2), {}),
        "lengths beyond the end": (raw_block(columns=b"\1\4" + struct.pack("<I", 0xFFFFFFFF) + FIXED * 2), {}),
        "bytes left over": (raw_block() + b"\0", {}),
        "cut off": (raw_block()[:-1], {}),
        "cut off within numbers": (raw_block()[:15], {}),
        "nothing but a count": (raw_block()[:3], {}),
    }.values(),
)
def test_a_block_that_contradicts_itself_is_refused(raw: bytes, entry: dict[str, int]) -> None:
    with pytest.raises(CorruptData):
        next(decode_segment(forged(raw, entry), "x"))


@pytest.mark.parametrize(
    "entry",
    [
        {"records": 0},
        {"records": (1 << 20) + 1},
        {"raw_length": 0},
        {"raw_length": (80 << 20) + 1, "codec": CODEC_ZSTD},
        {"raw_length": 1000},
        {"first": 4, "last": 3},
        {"from": 0, "to": 2},
        {"from": 1, "to": 1},
    ],
)
def test_an_index_that_contradicts_itself_is_refused(entry: dict[str, int]) -> None:
    with pytest.raises(CorruptData):
        next(decode_segment(forged(raw_block(), entry), "x"))


def test_a_codec_of_a_later_release_is_named() -> None:
    with pytest.raises(Invalid, match="codec 2"):
        next(decode_segment(forged(raw_block(), {"codec": 2}), "x"))


def test_a_million_changes_of_no_bytes_take_bounded_memory() -> None:
    count = 1 << 20
    data = forged(raw_block([(3, 0, count)]), {"records": count})
    tracemalloc.start()
    try:
        assert sum(batch.num_rows for *_, batch in decode_segment(data, "x")) == count
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
    finally:
        tracemalloc.stop()


def test_a_footer_that_declares_more_than_it_holds_is_refused() -> None:
    good = forged(raw_block())
    end = 16 + len(raw_block())
    footer = good[end:-24]
    for at in range(len(footer) - 3):
        lie = footer[:at] + b"\xff\xff\xff\x7f" + footer[at + 4 :]
        data = good[:end] + lie + pack_trailer(lie)
        with pytest.raises((CorruptData, Invalid)):
            next(decode_segment(data, "x"))


def test_blocks_out_of_order_are_refused(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segment_encoder, "_SMALL_BLOCK", 0)
    rows = random_rows(random.Random(seed), 4000, key_groups=2)
    data = encode_segment([("a", 0, change_set(rows))], writer_id="w")
    index = parse_index(data, "x")
    blocks = list(index.logs[0].blocks)
    assert len(blocks) == 2
    swapped = [LogIndex("a", SequenceNumberRange(0, 1), BlockTable.of(blocks[::-1], 0))]
    stored = b"".join(data[b.offset : b.offset + b.length] for b in blocks[::-1])
    footer = pack_footer("w", {}, swapped)
    with pytest.raises(CorruptData, match="out of order"):
        next(decode_segment(pack_header() + stored + footer + pack_trailer(footer), "x"))
