"""Golden files stay readable for ever. A format change adds a file; it never rewrites one."""

import struct
from pathlib import Path

import google_crc32c
import pytest

from dstl.changelog.change_set import OP_PUT, ChangeSet
from dstl.changelog.segment.encoder import encode_segment
from dstl.changelog.segment.index import pack_trailer
from dstl.changelog.segment.reader import parse_index, verify_segment
from dstl.errors import CorruptData, Invalid
from worlds.segment_samples import batch_of, decoded, expected, feature_sets

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
    """Make the files that are not there: ``python -c 'import test_segment_compatibility as t; ...'`` in this folder
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
