"""The frame of manifests and savepoints: what it takes, and what it finds wrong."""

import struct
from dataclasses import replace

import google_crc32c
import pytest
import zstandard
from pydantic import BaseModel, ValidationError

from dstl.checkpoint.record_frame import RecordFrame, complaint
from dstl.errors import CorruptData, Invalid

FRAME = RecordFrame(b"DSTLTEST", b"TESTDONE", "a test's record", 100, "split it", 3, 1)
ROOMY = RecordFrame(b"DSTLTEST", b"TESTDONE", "a test's record", 100, "split it", 3, 1, inlines=True)
RECORD = {"a": [1, 2.5, None], "b": "ü"}


def damaged(what: str) -> CorruptData:
    return CorruptData(f"record x: {what}")


def framed(body: bytes, raw: int, front: bytes = b"DSTLTEST", end: bytes = b"TESTDONE", length: int = -1) -> bytes:
    """Frame a body with a right checksum, whatever it says of itself."""
    data = front + body + struct.pack("<II", len(body) if length < 0 else length, raw)
    return data + struct.pack("<I8s", google_crc32c.value(data), end)


def test_what_was_packed_is_unpacked_with_and_without_other_bytes_before_the_body() -> None:
    assert FRAME.unpack(FRAME.pack(RECORD), "record x", damaged) == RECORD
    data = ROOMY.pack(RECORD, [b"one", b"two"])
    assert data.startswith(b"DSTLTESTonetwo")
    assert ROOMY.unpack(data, "record x", damaged) == RECORD
    with pytest.raises(CorruptData, match=r"a body of \d+ bytes, 31 unpacked, is declared"):
        FRAME.unpack(data, "record x", damaged)


def test_a_record_of_the_largest_size_is_packed_and_a_larger_one_is_refused() -> None:
    fits = {"a": "x" * 92}
    assert FRAME.unpack(FRAME.pack(fits), "record x", damaged) == fits
    with pytest.raises(Invalid, match="of 101 bytes is too large: split it"):
        FRAME.pack({"a": "x" * 93})
    with pytest.raises(ValueError, match="Out of range float"):
        FRAME.pack({"a": float("nan")})


def test_a_record_of_a_reader_that_takes_less_is_refused_before_it_is_unpacked() -> None:
    raw = b'{"a":"' + b"x" * 93 + b'"}'
    with pytest.raises(CorruptData, match="record x: "):
        FRAME.unpack(framed(zstandard.compress(raw), len(raw)), "record x", damaged)


def test_a_small_record_unpacks_to_no_large_one() -> None:
    """Of a body that packs as no index does; below a megabyte it may."""
    large = replace(FRAME, max_raw=128 << 20)
    assert large.unpack(large.pack({"a": "x" * ((1 << 20) - 8)}), "record x", damaged)
    raw = b'{"a":"' + b"x" * (2 << 20) + b'"}'
    with pytest.raises(CorruptData, match="2097160 unpacked, is declared"):
        large.unpack(framed(zstandard.compress(raw), len(raw)), "record x", damaged)
    with pytest.raises(Invalid, match="as none does: split it"):
        large.pack({"a": "x" * (2 << 20)})


def test_a_body_may_not_reach_into_the_magic() -> None:
    body = zstandard.compress(b"{}")
    assert ROOMY.unpack(framed(body, 2), "record x", damaged) == {}
    assert ROOMY.unpack(framed(b"more" + body, 2, length=len(body)), "record x", damaged) == {}
    for frame in (FRAME, ROOMY):
        with pytest.raises(CorruptData, match="is declared"):
            frame.unpack(framed(body, 2, length=len(body) + 1), "record x", damaged)
    with pytest.raises(CorruptData, match="is declared"):
        FRAME.unpack(framed(body, 2, length=len(body) - 1), "record x", damaged)


@pytest.mark.parametrize(
    ("data", "what"),
    [
        (b"", "0 bytes that do not begin like a test's record"),
        (framed(b"", 0)[:-1], "27 bytes that do not begin like"),
        (framed(b"", 0), "record x: not enough data"),
        (framed(zstandard.compress(b"{}"), 2, front=b"DSTLTESU"), "do not begin like"),
        (framed(zstandard.compress(b"{}"), 2, end=b"TESTDONF"), "checksum or end mark is wrong"),
        (framed(zstandard.compress(b"[NaN]"), 5), "record x: "),
        (framed(zstandard.compress(b"{}"), 3), "record x: "),
        (framed(zstandard.compress(b"{"), 1), "record x: "),
        (framed(zstandard.compress(b"[]"), 2), "record x: its body is no JSON object"),
    ],
)
def test_damage_is_named(data: bytes, what: str) -> None:
    with pytest.raises(CorruptData, match=what):
        FRAME.unpack(data, "record x", damaged)


def test_a_record_of_a_newer_version_is_refused() -> None:
    with pytest.raises(Invalid, match=r"^record x has format 2, this DSTL reads up to 1: upgrade it$"):
        FRAME.unpack(FRAME.pack({"version": 2}), "record x", damaged)


def test_every_flipped_bit_truncation_and_extension_is_found() -> None:
    for frame, data in ((FRAME, FRAME.pack(RECORD)), (ROOMY, ROOMY.pack(RECORD, [b"one", b"two"]))):
        wrong = [data[:length] for length in range(len(data))] + [data + b"\0", data + data, data + b"TESTDONE"]
        for at in range(8 * len(data)):
            flipped = bytearray(data)
            flipped[at // 8] ^= 1 << at % 8
            wrong.append(bytes(flipped))
        for each in wrong:
            with pytest.raises(CorruptData):
                frame.unpack(each, "record x", damaged)


def test_nothing_may_stand_behind_the_body() -> None:
    body = zstandard.compress(b"{}")
    for extra in (b"\0", body):
        with pytest.raises(CorruptData):
            ROOMY.unpack(framed(body + extra, 2), "record x", damaged)


def test_a_complaint_is_the_first_field_and_what_is_wrong_with_it() -> None:
    class Model(BaseModel):
        one: int
        two: int

    with pytest.raises(ValidationError) as found:
        Model.model_validate({"one": "x", "two": "y"})
    field, wrong = complaint(found.value).split("; ")
    assert field == "one"
    assert wrong.startswith("Input should be a valid integer")
