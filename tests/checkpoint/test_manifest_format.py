"""The bytes of a record: nothing damaged, foreign, newer or hostile gets past the decoder."""

import json
import struct
from collections.abc import Callable
from pathlib import Path

import google_crc32c
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from dstl.checkpoint.manifest.format import (
    MANIFEST_VERSION,
    ManifestRecord,
    decode_record,
    encode_record,
    inline_offsets,
    manifest_name,
)
from dstl.checkpoint.manifest.history import HistoryEntry
from dstl.errors import CorruptData, Invalid
from handles.checkpoint import (
    CompletedCheckpoint,
    LogEntry,
    OperatorEntry,
    SegmentEntry,
    TruncatedEntry,
    log_coverage,
)
from handles.file_record import FileEntry, FileRecord
from handles.materialized_handle import MaterializedStateHandle, TableFile
from handles.segment_handle import SegmentHandle
from worlds.manifest_samples import QUERY, checkpoint, record, record_of

GOLDEN = Path(__file__).parents[1] / "golden"
INLINED = (b"first inlined segment", b"second")

HISTORY = (
    HistoryEntry(kind="restore", at=10.5, checkpoint_id=7, batch_id=40, seconds=0.25, new_bytes=1000),
    HistoryEntry(kind="failed", at=11.0, checkpoint_id=8, batch_id=40, seconds=3.0, error="Unavailable: <no answer>"),
    HistoryEntry(
        kind="checkpoint",
        at=12.25,
        checkpoint_id=8,
        batch_id=40,
        seconds=0.5,
        persist_s=0.25,
        assemble_s=0.0625,
        commit_s=0.125,
        notify_s=0.0625,
        requests=3,
        hedges=1,
        new_bytes=500,
        full_bytes=9000,
        inlined=1,
        materializations=2,
        late_rows=4,
        state_rows=600,
        state_bytes=7000,
    ),
    HistoryEntry(kind="checkpoint", at=13.5, checkpoint_id=9, batch_id=41, persist_s=0.25, assemble_s=0.125),
)


def full_record() -> ManifestRecord:
    """Every field of the format, filled."""
    body = CompletedCheckpoint(
        checkpoint_id=9,
        batch_id=41,
        query_id=QUERY,
        run_id="run-2",
        parent=8,
        max_parallelism=128,
        created_at=1763640000.25,
        watermark_ms=1763639990000,
        operators=(
            OperatorEntry(
                uid="flights",
                parallelism=4,
                key_types="string,bigint",
                registry={"states": [{"name": "délai", "ttl_ms": None}], "version": 1},
                watermark_ms=1763639990000,
            ),
            OperatorEntry(uid="empty", parallelism=1, key_types=""),
        ),
        materialized=(
            MaterializedStateHandle(
                operator="flights",
                materialization_id=3,
                checkpoint=5,
                name="bases/x",
                size=900,
                checksum=4294967295,
                parts=((0, 0, 450), (1, 450, 750)),
                files=(TableFile("0123456789abcdef-000012.sst", "bases/y", 300, 77),),
            ),
        ),
        truncated=(TruncatedEntry(operator="flights", first_key_group=0, last_key_group=1, checkpoint=5),),
        logs=(
            LogEntry(log_id="log-a", operator="flights", first_key_group=0, last_key_group=1, from_sqn=7),
            LogEntry(log_id="log-b", operator="flights", first_key_group=2, last_key_group=127),
            LogEntry(log_id="log-c", operator="empty", first_key_group=0, last_key_group=127),
        ),
        segments=(
            SegmentEntry(
                segment=("a1b2/q/w/0.seg", 1000, 1, 0),
                first_key_group=0,
                last_key_group=127,
                ranges=((0, 7, 9), (1, 0, 2), (2, 0, 1)),
                checkpoint=6,
            ),
            SegmentEntry(
                segment=(manifest_name(9), 21, 2, 8),
                first_key_group=2,
                last_key_group=127,
                ranges=((1, 2, 3), (0, 9, 10)),
                checkpoint=9,
            ),
        ),
        logged_at=((6, 1763639000), (9, 1763640000)),
    )
    entry = FileEntry("commits/41", 29, 1_700_000_000_123, SegmentHandle(manifest_name(9), 214, 5, 70), "log-a", 3)
    return ManifestRecord(
        kind="checkpoint",
        sequence=9,
        epoch=4,
        oldest=7,
        put_id="0123456789abcdef0123456789abcdef",
        query_id=QUERY,
        created_at=1763640000.5,
        history=HISTORY,
        checkpoint=body,
        files=FileRecord.of("commits/41", "run-2", [entry], ["offsets/1"]),
    )


def framed(plain: object, *, raw_length: int | None = None, body: bytes | None = None) -> bytes:
    """A record that is well framed, whatever it holds."""
    raw = plain if isinstance(plain, bytes) else json.dumps(plain).encode()
    body = zstandard.ZstdCompressor().compress(raw) if body is None else body
    front = b"DSTLMAN1" + body + struct.pack("<II", len(body), len(raw) if raw_length is None else raw_length)
    return front + struct.pack("<I8s", google_crc32c.value(front), b"1NAMLTSD")


def plain_of(found: ManifestRecord) -> dict[str, object]:
    data = encode_record(found)
    body_length, _ = struct.unpack_from("<II", data, len(data) - 20)
    raw = zstandard.ZstdDecompressor().decompress(data[len(data) - 20 - body_length : len(data) - 20])
    return json.loads(raw)  # type: ignore[no-any-return]


@pytest.mark.parametrize("each", [full_record(), record("fence", 1), record("abort", 3), record("checkpoint", 2)])
def test_a_record_is_decoded_as_it_was_encoded(each: ManifestRecord) -> None:
    assert decode_record(encode_record(each, INLINED), "m") == each


def test_a_damaged_record_says_what_to_do() -> None:
    """Which damage is found is the frame's own matter: ``test_record_frame.py``."""
    damaged = bytearray(encode_record(full_record(), INLINED))
    damaged[50] ^= 1
    with pytest.raises(CorruptData, match=r'manifest m is damaged.*bring it back.* restore="previous"\)'):
        decode_record(bytes(damaged), "m")


def test_a_newer_version_is_refused_with_both_versions_named() -> None:
    for version in (MANIFEST_VERSION + 1, 77):
        plain = plain_of(full_record()) | {"version": version, "unheard of": {}}
        with pytest.raises(
            Invalid, match=rf"manifest m has format {version}, this DSTL reads up to {MANIFEST_VERSION}: upgrade"
        ):
            decode_record(framed(plain), "m")


def test_runs_that_would_expand_without_end_are_refused() -> None:
    """A few bytes of runs may stand for many ranges: the bound is on the ranges."""
    plain = plain_of(full_record())
    body = plain["checkpoint"]
    assert isinstance(body, dict)
    body["logs"] = [body["logs"][0] | {"log_id": str(n), "from_sqn": 0} for n in range(2000)]
    body["segments"] = [[f"s{n}", 1, 1, 0, 0, 1, 6, [0, 2000, 1] * 50] for n in range(50)]
    with pytest.raises(CorruptData, match="cannot be"):
        decode_record(framed(plain), "m")


@pytest.mark.parametrize(
    "change",
    [
        {"kind": "checkpoint", "checkpoint": None},
        {"kind": "fence"},
        {"kind": "savepoint"},
        {"version": 0},
        {"version": "1"},
        {"version": None},
        {"sequence": 8},
        {"sequence": 0},
        {"epoch": 10},
        {"oldest": 10},
        {"oldest": -1},
        {"query_id": "another"},
        {"put_id": 7},
        {"unheard_of": 1},
    ],
)
def test_a_record_that_contradicts_itself_is_damaged(change: dict[str, object]) -> None:
    with pytest.raises((CorruptData, Invalid)):
        decode_record(framed(plain_of(full_record()) | change), "m")


@pytest.mark.parametrize(
    "change",
    [
        {"logs": []},
        {"logs": None},
        {"segments": []},
        {"segments": [["x", 1, 1, 0, 0, 127, 6, [0, 1]]]},
        {"segments": [["x", 1, 1, 0, 0, 127, 6, [0, 4, 1]]]},
        {"segments": [["x", 1, 1, 0, 0, 127, 6, [-1, 1, 1]]]},
        {"segments": [["x", 1, 1, 0, 0, 127, 6, [0, 3, 0]]]},
        {"segments": [["x", 1, 1, 0, 0, 127, 6, [0, 3, -4]]]},
        {"segments": [["x", -1, 1, 0, 0, 127, 6, [0, 3, 1]]]},
        {"segments": [["x", 1, 1, 0, 0, 128, 6, [0, 3, 1]]]},
        {"segments": [["x", 1, 1, 0, 9, 3, 6, [0, 3, 1]]]},
        {"segments": [["x", 1, 1, 0, 0, 127, 10, [0, 3, 1]]]},
        {"segments": [["x", 1, 1]]},
        {"segments": {"x": 1}},
        {"segments": 7},
        {"max_parallelism": 0},
        {"max_parallelism": 1 << 40},
        {"batch_id": -2},
        {"checkpoint_id": 3},
    ],
)
def test_a_checkpoint_that_cannot_be_is_damaged(change: dict[str, object]) -> None:
    plain = plain_of(full_record())
    body = plain["checkpoint"]
    assert isinstance(body, dict)
    plain["checkpoint"] = body | change
    with pytest.raises(CorruptData):
        decode_record(framed(plain), "m")


def test_what_no_reader_would_take_is_not_written() -> None:
    """Found in review: the writer had no limit, so a manifest could be committed that nobody can read back."""
    logs = tuple(LogEntry(log_id=str(n), operator="op", first_key_group=0, last_key_group=0) for n in range(1 << 10))
    ranges = [tuple((log, at, at + 1) for log in range(1 << 10)) for at in range(1025)]
    body = checkpoint(
        2,
        0,
        max_parallelism=1,
        logs=logs,
        segments=tuple(
            SegmentEntry.model_construct(
                segment=(f"s{at}", 1, 1, 0), first_key_group=0, last_key_group=0, ranges=held, checkpoint=1
            )
            for at, held in enumerate(ranges)
        ),
    )
    with pytest.raises(Invalid, match="materialize more often"):
        encode_record(record_of(body))


@pytest.mark.parametrize(
    "history",
    [
        [],
        {"kind": "checkpoint"},
        {"kind": ["checkpoint"]},
        {"kind": ["checkpoint", "failed"], "at": [1.0]},
        {"kind": ["unheard of"], "at": [1.0]},
        {"kind": ["failed"], "at": [1.0], "unheard of": [1]},
        {"kind": ["failed"], "at": [1.0], "requests": [-1]},
    ],
)
def test_a_history_that_is_none_is_damage(history: object) -> None:
    plain = plain_of(full_record()) | {"history": history}
    with pytest.raises(CorruptData, match="manifest m is damaged"):
        decode_record(framed(plain), "m")


def record_of_files() -> ManifestRecord:
    """A whole record: a file that lies in it, one in an object of its own, and one that was adopted."""
    entries = (
        FileEntry("commits/7", 29, 1_700_000_000_123, SegmentHandle(manifest_name(9), 214, 5, 8), "log-a", 3),
        FileEntry("state/0/1/8_é.changelog", 70_000_000, 1, SegmentHandle("0a1b/files/w/x.seg", 99, 7), "log-b", 0),
        FileEntry("metadata", 0, 2, SegmentHandle("plain:metadata", 0, 0), "", 0),
    )
    files = FileRecord.of("commits/7", "run-1", entries, ["offsets/1"], is_whole=True)
    return record("fence", 9).model_copy(update={"kind": "files", "epoch": 2, "files": files})


@pytest.mark.parametrize(
    ("name", "made"),
    [
        ("manifest_v1", full_record),
        ("manifest_v1_fence", lambda: record("fence", 1)),
        ("manifest_v1_files", record_of_files),
    ],
)
def test_golden_manifests_stay_readable(name: str, made: Callable[[], ManifestRecord]) -> None:
    """Never rewritten once their version is released: a new version adds a file."""
    data = (GOLDEN / f"{name}.dstl").read_bytes()
    assert decode_record(data, "golden") == made()
    if made is full_record:
        offset, _ = inline_offsets([len(p) for p in INLINED])
        assert data[offset : offset + len(INLINED[0])] == INLINED[0]


def test_a_fence_has_no_files() -> None:
    with pytest.raises(CorruptData, match="a fence with the wrong body"):
        decode_record(framed(plain_of(record_of_files()) | {"kind": "fence"}), "m")


@pytest.mark.parametrize("place", [3, 4])
def test_an_entry_of_a_file_that_names_nothing_is_damage(place: int) -> None:
    plain = plain_of(record_of_files())
    plain["files"]["added"][1][place] = 3
    with pytest.raises(CorruptData, match="does not list"):
        decode_record(framed(plain), "m")


ranges_of_logs = st.lists(st.lists(st.integers(1, 5), min_size=1, max_size=6), min_size=1, max_size=5)


@settings(deadline=None, max_examples=40)
@given(ranges_of_logs, st.randoms(use_true_random=False), st.integers(0, 3))
def test_ranges_survive_being_packed_as_runs(lengths: list[list[int]], rng, start: int) -> None:  # type: ignore[no-untyped-def]
    """Any interleaving of logs over segments in which each log ascends."""
    waiting = [list(each) for each in lengths]
    following = [start] * len(lengths)
    segments = []
    while any(waiting):
        held = []
        for log in rng.sample(range(len(waiting)), rng.randint(1, len(waiting))):
            if waiting[log]:
                sets = waiting[log].pop(0)
                held.append((log, following[log], following[log] + sets))
                following[log] += sets
        if held:
            segments.append(
                SegmentEntry(
                    segment=(f"s{len(segments)}", 1, 1, 0),
                    first_key_group=0,
                    last_key_group=3,
                    ranges=tuple(held),
                    checkpoint=1,
                )
            )
    body = checkpoint(
        2,
        0,
        max_parallelism=4,
        materialized=(
            MaterializedStateHandle(
                operator="op",
                materialization_id=1,
                checkpoint=1,
                name="b",
                size=4,
                checksum=0,
                parts=tuple((g, g, 1) for g in range(4)),
            ),
        ),
        truncated=(TruncatedEntry(operator="op", first_key_group=0, last_key_group=3, checkpoint=1),),
        logs=tuple(
            LogEntry(log_id=str(n), operator="op", first_key_group=0, last_key_group=3, from_sqn=start)
            for n in range(len(lengths))
        ),
        segments=tuple(segments),
    )
    found = decode_record(encode_record(record_of(body)), "m")
    assert found.checkpoint == body
    assert {log: r.to_sqn for log, r in log_coverage(body).items()} == {
        str(n): start + sum(each) for n, each in enumerate(lengths)
    }
