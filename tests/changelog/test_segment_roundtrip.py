import random
import struct
from pathlib import Path

import google_crc32c
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dstl.changelog.change_set import META_KEY_GROUP, OP_PUT, ChangeSet
from dstl.changelog.segment import encoder as segment_encoder
from dstl.changelog.segment.encoder import encode_blocks, encode_segment, segment_checksum
from dstl.changelog.segment.index import pack_trailer
from dstl.changelog.segment.reader import decode_segment, parse_index, verify_segment
from dstl.errors import CorruptData, Invalid
from handles.segment_handle import SequenceNumberRange
from worlds.segment_samples import batch_of, change_set, decoded, expected, feature_sets, random_rows


def encode(sets: list[tuple[str, int, ChangeSet]], **options: object) -> bytes:
    return encode_segment(sets, writer_id="writer-1", **options)


def test_every_feature_comes_back() -> None:
    sets = feature_sets()
    assert decoded(encode(sets)) == expected(sets)


@given(
    st.integers(0, 1 << 32),
    st.lists(st.tuples(st.sampled_from(["a", "b"]), st.integers(0, 6)), min_size=1, max_size=8, unique=True),
)
@settings(max_examples=60, deadline=None)
def test_random_sets_come_back_in_order(number: int, keys: list[tuple[str, int]]) -> None:
    rng = random.Random(number)
    sets = []
    for log_id, sqn in keys:
        changes = change_set(random_rows(rng, rng.randrange(1, 30)))
        if rng.random() < 0.5:
            changes.append_batch(batch_of(random_rows(rng, rng.randrange(1, 30))))
        if rng.random() < 0.3:
            changes.append_metadata(rng.randbytes(5))
        sets.append((log_id, sqn, changes))
    data = encode(sets)
    assert decoded(data) == expected(sets)
    held = {
        (log.log_id, sqn) for log in parse_index(data, "x").logs for sqn in range(log.sqns.from_sqn, log.sqns.to_sqn)
    }
    assert held == set(keys)


@given(st.integers(0, 1 << 32), st.lists(st.tuples(st.sampled_from(["a", "b"]), st.integers(0, 6)), unique=True))
@settings(max_examples=60, deadline=None)
def test_sets_that_were_encoded_before_make_the_same_segment(number: int, early: list[tuple[str, int]]) -> None:
    rng = random.Random(number)
    keys = [("a", sqn) for sqn in (0, 1, 3, 5)] + [("b", sqn) for sqn in (2, 4)]
    sets = {key: change_set(random_rows(rng, rng.randrange(1, 30))) for key in keys}
    encoded = {key: encode_blocks(key[1], sets[key]) for key in early if key in sets}
    listed = [(*key, changes) for key, changes in sets.items()]
    assert encode(listed, encoded=encoded) == encode(listed)


def test_what_was_encoded_before_is_not_encoded_again(rng: random.Random) -> None:
    one, other = (change_set(random_rows(rng, 20)) for _ in range(2))
    assert encode([("a", 3, one)], encoded={("a", 3): encode_blocks(3, other)}) == encode([("a", 3, other)])


def test_logs_with_the_same_metadata_have_it_under_their_own_numbers(rng: random.Random) -> None:
    """Its block is made once, and was made for another log, number and batch before."""
    sets = []
    for log_id, sqn in (("a", 3), ("b", 70), ("c", 4), ("c", 5), ("d", 9)):
        changes = ChangeSet()
        changes.append_metadata(b"the states")
        if log_id != "d":
            changes.append_batch(batch_of(random_rows(rng, 9)))
        sets.append((log_id, sqn, changes))
    assert decoded(encode(sets)) == expected(sets)
    assert encode(sets) == encode(sets)


def test_large_sets_are_cut_and_joined_without_changing_what_is_read(
    rng: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("_LARGE_BLOCK", 3000), ("_SMALL_BLOCK", 600), ("_SMALL_BATCH", 40)):
        monkeypatch.setattr(segment_encoder, name, value)
    sets = []
    for sqn in range(4):
        changes = ChangeSet()
        for _ in range(6):
            rows = random_rows(rng, rng.randrange(1, 90), key_groups=4)
            fixed = [(group, 0, OP_PUT, rng.randbytes(8), b"", rng.randbytes(16)) for group, *_ in rows]
            changes.append_batch(batch_of(rng.choice((rows, fixed, sorted(fixed), sorted(rows)))))
        changes.append_batch(batch_of([(0, 0, OP_PUT, b"big", b"", rng.randbytes(9000))]))
        sets.append(("log", sqn, changes))
    data = encode(sets)
    blocks = parse_index(data, "x").logs[0].blocks
    assert len({(block.first_key_group, block.last_key_group) for block in blocks}) < len(blocks)
    assert decoded(data) == expected(sets)


def test_the_order_of_the_sets_does_not_matter() -> None:
    sets = feature_sets()
    assert encode(sets) == encode(list(reversed(sets)))


def test_the_index_names_writer_metadata_and_numbers_and_tiles_the_segment() -> None:
    data = encode_segment(feature_sets(), writer_id="writer-1", metadata={"query": "q"})
    index = parse_index(data, "x")
    assert (index.writer_id, dict(index.metadata)) == ("writer-1", {"query": "q"})
    assert index.sqn_ranges("log-a") == [SequenceNumberRange(3, 5), SequenceNumberRange(9, 10)]
    assert index.sqn_ranges("nobody") == []
    blocks = [block for log in index.logs for block in log.blocks]
    assert blocks[0].offset == 16
    assert [a.offset + a.length for a in blocks] == [b.offset for b in blocks[1:]] + [index.footer_offset]
    assert blocks[0].first_key_group == META_KEY_GROUP


def test_small_segments_stay_small(rng: random.Random) -> None:
    one = change_set([(3, 1, OP_PUT, b"k", b"", b"v")])
    assert len(encode_segment([("log-a", 0, one)], writer_id="w")) <= 150
    sets = []
    for log in range(16):
        rows = [(group, 0, OP_PUT, rng.randbytes(8), b"", rng.randbytes(16)) for group in range(128) for _ in range(5)]
        sets.append((f"log-{log:02d}", 0, change_set(rows)))
    payload = 16 * 128 * 5 * 24
    assert len(encode(sets)) < 1.03 * payload  # incompressible: what is more is the format


def test_nothing_is_written_for_an_empty_change_set() -> None:
    with pytest.raises(Invalid):
        encode([])
    with pytest.raises(Invalid):
        encode([("a", 0, change_set([(1, 0, OP_PUT, b"", b"", b"")])), ("a", 1, ChangeSet())])


def test_a_sequence_number_is_written_once() -> None:
    rows = [(1, 0, OP_PUT, b"", b"", b"")]
    with pytest.raises(Invalid, match="two change sets"):
        encode([("a", 4, change_set(rows)), ("a", 4, change_set(rows))])


@pytest.mark.parametrize("level", [-5, 1, 19])
def test_every_compression_level_reads_the_same(level: int, seed: int) -> None:
    sets = [("a", 0, change_set(random_rows(random.Random(seed), 400)))]
    assert decoded(encode(sets, compression_level=level)) == expected(sets)


def test_changes_of_no_bytes_at_all_come_back() -> None:
    changes = ChangeSet()
    changes.append_batch(batch_of([(0, 0, OP_PUT, b"", b"", b"")] * 5000))
    data = encode([("a", 0, changes)])
    assert sum(batch.num_rows for *_, batch in decode_segment(data, "x")) == 5000


def test_the_checksum_is_crc_32c() -> None:
    assert segment_checksum(b"123456789") == 0xE3069283


GOLDEN = Path(__file__).parents[1] / "golden"


def golden_sets() -> dict[str, list[tuple[str, int, ChangeSet]]]:
    """What the golden files hold, by file name."""
    compressed = ChangeSet()
    compressed.append_batch(batch_of([(9, 0, OP_PUT, b"key", b"", b"compresses well")] * 200))
    wide = ChangeSet()
    wide.append_batch(
        batch_of([(group % 128, 1, OP_PUT, group.to_bytes(8, "big"), b"", bytes(group % 70)) for group in range(1200)])
    )
    return {
        "segment_v1.dstl": [*feature_sets(), ("log-d", 0, compressed), ("log-e", 2, wide)],
        "segment_v1_stored.dstl": feature_sets()[:1],
    }


def write_golden_files(directory: Path) -> None:
    """Make the files that are not there: ``python -c 'import test_segment_roundtrip as t; ...'`` in this folder
    with ``t.write_golden_files(t.GOLDEN)``. A file that is there is the past and is left alone."""
    for name, sets in golden_sets().items():
        path = directory / name
        if not path.exists():
            path.write_bytes(encode_segment(sets, writer_id="golden", metadata={"query": "q-1"}))


@pytest.mark.parametrize("name", sorted(golden_sets()))
def test_a_golden_file_is_readable(name: str) -> None:
    data = (GOLDEN / name).read_bytes()
    index = verify_segment(data, name)
    assert (index.version, index.writer_id, dict(index.metadata)) == ((1, 0), "golden", {"query": "q-1"})
    assert decoded(data) == expected(golden_sets()[name])


def test_no_golden_file_is_without_a_test() -> None:
    assert {path.name for path in GOLDEN.glob("segment_*.dstl")} == set(golden_sets())


def test_uncompressed_bytes_are_exactly_those_of_the_golden_file() -> None:
    name = "segment_v1_stored.dstl"
    written = encode_segment(golden_sets()[name], writer_id="golden", metadata={"query": "q-1"})
    assert written == (GOLDEN / name).read_bytes()


def reversioned(data: bytes, major: int, minor: int, extra_footer: bytes = b"") -> bytes:
    """The segment as a release of another format version would write it, with right checksums."""
    header = data[:8] + struct.pack("<HH", major, minor)
    header += struct.pack("<I", google_crc32c.value(header))
    start = parse_index(data, "x").footer_offset
    footer = data[start:-24] + extra_footer
    trailer = struct.pack("<IIHH", len(footer), google_crc32c.value(footer), major, minor)
    trailer += struct.pack("<I", google_crc32c.value(trailer)) + data[-8:]
    return header + data[16:start] + footer + trailer


def test_an_unknown_major_version_is_refused_naming_both() -> None:
    data = reversioned((GOLDEN / "segment_v1_stored.dstl").read_bytes(), 2, 0)
    with pytest.raises(Invalid, match=r"2\.0.*1\.x"):
        parse_index(data, "x")


def test_a_later_minor_version_may_add_to_the_footer_and_is_read() -> None:
    data = (GOLDEN / "segment_v1_stored.dstl").read_bytes()
    later = reversioned(data, 1, 7, b"something new")
    assert parse_index(later, "x").version == (1, 7)
    assert decoded(later) == decoded(data)
    with pytest.raises(CorruptData):
        parse_index(reversioned(data, 1, 0, b"something new"), "x")


def test_unknown_flags_and_reserved_bits_of_a_block_are_ignored() -> None:
    data = (GOLDEN / "segment_v1_stored.dstl").read_bytes()
    start = parse_index(data, "x").footer_offset
    footer = bytearray(data[start:-24])
    table = len(footer) - 32 * len(parse_index(data, "x").logs[0].blocks)
    footer[table] |= 0xF0
    footer[table + 1] |= 0xFF
    footer[table + 6 : table + 8] = b"\xff\xff"
    assert decoded(data[:start] + bytes(footer) + pack_trailer(bytes(footer))) == decoded(data)


def test_header_and_trailer_must_be_of_one_version() -> None:
    data = (GOLDEN / "segment_v1_stored.dstl").read_bytes()
    with pytest.raises(CorruptData, match="header"):
        parse_index(reversioned(data, 1, 1)[:16] + data[16:], "x")
