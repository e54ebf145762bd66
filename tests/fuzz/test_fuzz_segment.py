"""Mutation fuzzing of the segment decoders.

The short form runs with the others. The long one: ``DSTL_FUZZ_EXAMPLES=200000 python -m pytest tests/fuzz -m long
--timeout 0`` (about 500 examples a second; hypothesis prints how to repeat a failure).

Whatever the bytes, a decoder returns changes of the schema or raises ``CorruptData`` or ``Invalid``: nothing else, and
in bounded memory. Mutations below the checksums are sealed again, so that the parsers behind them are reached.
"""

import os
import struct
from pathlib import Path

import google_crc32c
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from dstl.changelog.change_set import CHANGE_SCHEMA
from dstl.changelog.segment.block_codec import decode_block
from dstl.changelog.segment.decoder import decode_segment, parse_index
from dstl.changelog.segment.frame import pack_trailer
from dstl.changelog.segment.index import CODEC_STORED, CODEC_ZSTD, BlockEntry
from dstl.errors import CorruptData, Invalid
from handles.sequence_number import SequenceNumberRange

GOLDEN = {
    path.name: path.read_bytes() for path in sorted((Path(__file__).parents[1] / "golden").glob("segment_*.dstl"))
}
LONG = int(os.environ.get("DSTL_FUZZ_EXAMPLES", "20000"))

MUTATIONS = st.lists(
    st.tuples(
        st.sampled_from(["set", "cut", "insert", "repeat"]),
        st.integers(0, 1 << 16),
        st.one_of(
            st.binary(min_size=1, max_size=9), st.sampled_from([b"\xff" * 4, b"\0" * 4, b"\xff\xff\xff\x7f", b"\1" * 2])
        ),
    ),
    min_size=1,
    max_size=4,
)
Mutations = list[tuple[str, int, bytes]]


def mutated(data: bytes, mutations: Mutations) -> bytes:
    for kind, where, what in mutations:
        at = where % (len(data) + 1)
        if kind == "set":
            data = data[:at] + what + data[at + len(what) :]
        elif kind == "cut":
            data = data[:at] + data[at + len(what) :]
        elif kind == "insert":
            data = data[:at] + what + data[at:]
        else:
            data = data[:at] + data[max(0, at - 40) : at] + data[at:]
    return data


def read_or_refuse(data: bytes) -> None:
    try:
        for *_, batch in decode_segment(data, "fuzz"):
            assert batch.schema == CHANGE_SCHEMA
            batch.validate(full=True)
    except (CorruptData, Invalid):
        pass


def check_anything(name: str, mutations: Mutations) -> None:
    read_or_refuse(mutated(GOLDEN[name], mutations))


def check_footer(name: str, mutations: Mutations) -> None:
    data = GOLDEN[name]
    start = parse_index(data, name).footer_offset
    footer = mutated(data[start:-24], mutations)
    read_or_refuse(data[:start] + footer + pack_trailer(footer))


def check_block(name: str, number: int, mutations: Mutations, recompress: bool) -> None:
    """Mutate a block below its frame and its checksum, and tell the truth of its lengths."""
    data = GOLDEN[name]
    log = parse_index(data, name).logs[number % len(parse_index(data, name).logs)]
    entry = log.blocks[number % len(log.blocks)]
    stored = data[entry.offset : entry.offset + entry.length]
    raw = zstandard.ZstdDecompressor().decompress(stored) if entry.codec == CODEC_ZSTD else stored
    raw = mutated(raw, mutations)
    if not raw:
        return
    stored, codec = (zstandard.ZstdCompressor().compress(raw), CODEC_ZSTD) if recompress else (raw, CODEC_STORED)
    forged = entry._replace(length=len(stored), raw_length=len(raw), checksum=google_crc32c.value(stored), codec=codec)
    decode_or_refuse(stored, forged, log.sqns.from_sqn)


def check_frame(mutations: Mutations, raw_length: int) -> None:
    """Mutate a zstd frame itself; the declared size may be anything that an index may declare."""
    frame = mutated(zstandard.ZstdCompressor().compress(struct.pack("<I", 1) * 100), mutations)
    if not frame:
        return
    span = (3, 3, SequenceNumberRange(0, 1), 1, 16)
    entry = BlockEntry(*span, len(frame), raw_length, google_crc32c.value(frame), CODEC_ZSTD)
    decode_or_refuse(frame, entry, 0)


def decode_or_refuse(stored: bytes, entry: BlockEntry, base_sqn: int) -> None:
    try:
        block = decode_block(stored, entry, base_sqn, "fuzz")
    except CorruptData:
        return
    block.batch.validate(full=True)
    assert sum(batch.num_rows for *_, batch in block.slices()) == entry.records


NAMES = st.sampled_from(sorted(GOLDEN))


@given(NAMES, MUTATIONS)
@settings(max_examples=300, deadline=None)
def test_any_mutation(name: str, mutations: Mutations) -> None:
    check_anything(name, mutations)


@given(NAMES, MUTATIONS)
@settings(max_examples=500, deadline=None)
def test_a_sealed_mutation_of_the_footer(name: str, mutations: Mutations) -> None:
    check_footer(name, mutations)


@given(NAMES, st.integers(0, 40), MUTATIONS, st.booleans())
@settings(max_examples=800, deadline=None)
def test_a_sealed_mutation_of_a_block(name: str, number: int, mutations: Mutations, recompress: bool) -> None:
    check_block(name, number, mutations, recompress)


@given(MUTATIONS, st.integers(1, 80 << 20))
@settings(max_examples=300, deadline=None)
def test_a_sealed_mutation_of_a_frame(mutations: Mutations, raw_length: int) -> None:
    check_frame(mutations, raw_length)


@given(st.binary(max_size=300))
@settings(max_examples=200, deadline=None)
def test_any_bytes(data: bytes) -> None:
    read_or_refuse(data)


@pytest.mark.long
@given(NAMES, st.integers(0, 40), MUTATIONS, st.booleans(), st.integers(1, 80 << 20))
@settings(max_examples=LONG, deadline=None)
def test_everything_for_long(name: str, number: int, mutations: Mutations, recompress: bool, raw_length: int) -> None:
    check_anything(name, mutations)
    check_footer(name, mutations)
    check_block(name, number, mutations, recompress)
    check_frame(mutations, raw_length)
