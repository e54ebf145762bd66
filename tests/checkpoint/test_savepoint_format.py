"""The bytes of a savepoint: what is written is read, every flipped bit is found, version 1 stays readable."""

import json
import struct
from pathlib import Path

import google_crc32c
import pytest
import zstandard
from pydantic import ValidationError

from dstl.checkpoint.savepoint.format import (
    EndMarker,
    Savepoint,
    SavepointFile,
    decode_marker,
    decode_savepoint,
    encode_record,
    parse_savepoint_location,
)
from dstl.errors import CorruptData, Invalid
from handles.checkpoint import OperatorEntry
from materializer.bases.key_group_file import decode_key_group, encode_key_group
from materializer.tables import HeapStateTable
from worlds.table_changes import changes, content, put

GOLDEN = Path(__file__).parents[1] / "golden"
ROWS = {(1, 0, b"aa", b""): b"one", (1, 0, b"ab", b""): b"two", (3, 7, b"list", b"\x00\x01"): b"x" * 300}


def base_file() -> tuple[bytes, tuple[tuple[int, int, int, int], ...]]:
    """Four key groups of one operator, two of them empty, one behind the other."""
    table = HeapStateTable()
    table.apply(changes(*(put(group, state, key, user, value) for (group, state, key, user), value in ROWS.items())))
    data, parts = b"", []
    for group in range(4):
        part = encode_key_group(table.snapshot(), group)
        parts.append((group, len(data), len(part.data), part.rows))
        data += part.data
    return data, tuple(parts)


def full_savepoint() -> Savepoint:
    """Every field of the format, filled."""
    data, parts = base_file()
    file = SavepointFile(
        operator="op",
        name="00112233445566778899aabbccddeeff/000000.base",
        size=len(data),
        checksum=google_crc32c.value(data),
        parts=parts,
    )
    return Savepoint(
        name="golden",
        put_id="00112233445566778899aabbccddeeff",
        created_at=1700000000.25,
        source="s3://bucket/jobs/flights",
        query_id="query-1",
        checkpoint_id=9,
        batch_id=41,
        watermark_ms=1699999999000,
        late_watermark_ms=1699999998000,
        sequence_base=12,
        max_parallelism=4,
        operators=(
            OperatorEntry(
                uid="op",
                parallelism=2,
                key_types="string",
                registry={"format": 1, "states": []},
                watermark_ms=1699999999000,
            ),
        ),
        files=(file,),
    )


def marker() -> EndMarker:
    return EndMarker(kind="claim", put_id="p", query_id="query-2", created_at=1700000001.5)


def write_golden_files(directory: Path) -> None:
    """Make the files that are not there; a file that is there is the past and is left alone."""
    made = {
        "savepoint_v1.dstl": encode_record(full_savepoint()),
        "savepoint_v1.base": base_file()[0],
        "savepoint_v1_ended.dstl": encode_record(marker()),
    }
    for name, data in made.items():
        if not (directory / name).exists():
            (directory / name).write_bytes(data)


def test_the_golden_savepoint_of_version_1_stays_readable() -> None:
    """Never rewritten: a new version adds a file."""
    found = decode_savepoint((GOLDEN / "savepoint_v1.dstl").read_bytes(), "golden", "here")
    assert found == full_savepoint()
    assert decode_marker((GOLDEN / "savepoint_v1_ended.dstl").read_bytes(), "golden", "here") == marker()
    data = (GOLDEN / "savepoint_v1.base").read_bytes()
    (file,) = found.files
    assert (len(data), google_crc32c.value(data)) == (file.size, file.checksum)
    table = HeapStateTable()
    for group, offset, length, entries in file.parts:
        pages = list(decode_key_group(data[offset : offset + length], group))
        assert sum(page.num_rows for page in pages) == entries
        table.restore(group, pages)
    assert content(table.snapshot(), range(4)) == ROWS


def test_a_damaged_descriptor_is_named() -> None:
    """Which damage is found is the frame's own matter: ``test_record_frame.py``."""
    data = encode_record(full_savepoint())
    assert decode_savepoint(data, "golden", "here") == full_savepoint()
    with pytest.raises(CorruptData, match=r"'golden' in here: savepoints/golden/savepoint\.dstl is damaged"):
        decode_savepoint(data[:50] + bytes([data[50] ^ 1]) + data[51:], "golden", "here")


def test_a_newer_format_is_refused_naming_both_versions() -> None:
    plain = {**full_savepoint().model_dump(mode="json"), "version": 2, "new": "thing"}
    raw = json.dumps(plain).encode()
    body = zstandard.compress(raw)
    front = b"DSTLSAV1" + body + struct.pack("<II", len(body), len(raw))
    data = front + struct.pack("<I8s", google_crc32c.value(front), b"1VASLTSD")
    with pytest.raises(Invalid, match="has format 2, this DSTL reads up to 1: upgrade it"):
        decode_savepoint(data, "golden", "here")


def test_a_swapped_descriptor_is_found_with_both_names() -> None:
    with pytest.raises(CorruptData, match=r"'other'.*describes savepoint 'golden'"):
        decode_savepoint(encode_record(full_savepoint()), "other", "here")


def test_a_descriptor_that_does_not_cover_the_state_cannot_be_made() -> None:
    whole = full_savepoint()
    (file,) = whole.files
    wrong = [
        ({"max_parallelism": 5}, "each of 5 key groups once"),
        ({"files": ()}, "each of 4 key groups once"),
        ({"files": (file, file)}, "key groups once"),
        ({"operators": ()}, "is not listed"),
        ({"operators": whole.operators * 2}, "listed twice"),
    ]
    for change, message in wrong:
        with pytest.raises(ValidationError, match=message):
            Savepoint.model_validate({**whole.model_dump(), **change})
    for change in ({"size": file.size + 1}, {"parts": file.parts[1:]}, {"name": "../other"}, {"parts": ()}):
        with pytest.raises((ValidationError, Invalid)):
            SavepointFile.model_validate({**file.model_dump(), **change})


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("s3://bucket/job/savepoints/mine", ("s3://bucket/job", "mine")),
        ("s3://bucket/savepoints/mine/", ("s3://bucket", "mine")),
        ("/data/job/savepoints/v1.2", ("/data/job", "v1.2")),
        ("s3://a/x,s3://b/y/savepoints/mine", ("s3://a/x,s3://b/y", "mine")),
        ("/savepoints/job/savepoints/mine", ("/savepoints/job", "mine")),
    ],
)
def test_a_savepoints_place_is_location_and_name(text: str, expected: tuple[str, str]) -> None:
    assert parse_savepoint_location(text) == expected


@pytest.mark.parametrize(
    "text", ["", "mine", "s3://bucket/mine", "savepoints/mine", "/x/savepoints/", "/x/savepoints/a/b"]
)
def test_what_is_no_savepoints_place_is_refused_with_the_form(text: str) -> None:
    with pytest.raises(Invalid, match="LOCATION/savepoints/NAME"):
        parse_savepoint_location(text)
