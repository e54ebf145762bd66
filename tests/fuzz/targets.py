"""Every decoder of stored bytes and of frames: samples of what it reads, and mutations that get past its checksums."""

import json
import random
import struct
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import google_crc32c
import msgpack
import numpy as np
import pyarrow as pa
import zstandard
from fuzz import rocksdb_files
from fuzz.mutator import mutate, mutate_json, to_text

from dstl.changelog.change_set import CHANGE_SCHEMA
from dstl.changelog.segment.index import (
    BLOCK,
    CODEC_MASK,
    CODEC_STORED,
    CODEC_ZSTD,
    HEADER_SIZE,
    TRAILER_SIZE,
    pack_trailer,
)
from dstl.changelog.segment.reader import decode_segment, parse_index
from dstl.checkpoint.manifest import format as manifest_format
from dstl.checkpoint.manifest.format import (
    ManifestRecord,
    decode_record,
    encode_record,
    manifest_name,
    manifest_sequence,
)
from dstl.checkpoint.savepoint import format as savepoint_format
from dstl.checkpoint.savepoint.format import (
    decode_marker,
    decode_savepoint,
    is_savepoint_object,
    parse_savepoint_location,
)
from dstl.errors import DstlError
from dstl.files.index import FileIndex
from dstl.files.origins import Origins
from dstl.rpc import fleet_messages, messages
from dstl.rpc.codec import CALL, Call, decode_message, encode_message, reply_of
from dstl.rpc.messages import VALUE_COLUMN, read_columns, write_columns
from dstl.rpc.protocol import FrameMac, Framing, decode_body, encode_frame, frame_length, raise_for
from dstl.state.codec.key_codec import KeyCodec
from dstl.state.codec.stored_schema import schema_from_json, schema_to_json
from dstl.state.codec.value_codec import ValueCodec
from dstl.state.codec.value_columns import ValueColumns
from dstl.state.descriptor import StateKind
from dstl.state.registry import StateRegistry
from dstl.store.base import check_name
from dstl.store.location import split_locations
from handles.file_record import FileEntry, FileRecord, elsewhere, foreign_object
from handles.segment_handle import SegmentHandle
from materializer.bases import key_group_file as base_file
from materializer.bases import table_directory as base_index
from materializer.bases.key_group_block import FRAME_BYTES, KeyGroupBlock
from materializer.bases.key_group_index import MAGIC, KeyGroupIndex, raw_index, read_index, seal_index
from materializer.bases.table_directory import decode_index
from worlds.ddl import parse_ddl

GOLDEN = Path(__file__).parents[1] / "golden"
CORPUS = Path(__file__).parent / "corpus"

Mutated = Callable[[random.Random], bytes]


class Target:
    """One decoder.

    Args:
        name: Of the decoder, and of the folder of its kept inputs.
        decode: Takes any bytes; what it may not raise is a bug.
        samples: Good bytes, which are mutated; none where only ``sealed`` makes what is worth a look.
        sealed: More ways to make an input, such as with right checksums over wrong contents.
        cost: How many times as long as others it takes: so many times fewer inputs are drawn.
    """

    def __init__(
        self, name: str, decode: Callable[[bytes], object], samples: list[bytes], *sealed: Mutated, cost: int = 1
    ) -> None:
        self.name, self.decode, self.samples, self.cost = name, decode, samples, cost
        self._makers = (self._any, *sealed) if samples else sealed

    def input(self, rng: random.Random) -> bytes:
        return rng.choice(self._makers)(rng)

    def kept(self) -> Iterator[Path]:
        """Yield the inputs that have found something once."""
        return iter(sorted((CORPUS / self.name).glob("*")))

    def _any(self, rng: random.Random) -> bytes:
        return mutate(rng, rng.choice(self.samples), self.samples)


def all_of(*decoders: Callable[[], object]) -> None:
    """Run all; where each has refused, raise what the last one said."""
    refusals: list[DstlError] = []
    for decode in decoders:
        try:
            decode()
        except DstlError as error:
            refusals.append(error)
    if len(refusals) == len(decoders):
        raise refusals[-1]


def _golden(pattern: str) -> list[bytes]:
    return [path.read_bytes() for path in sorted(GOLDEN.glob(pattern))]


def _segment() -> Target:
    samples = _golden("segment_*.dstl")

    def footer(rng: random.Random) -> bytes:
        data = rng.choice(samples)
        start = parse_index(data, "fuzz").footer_offset
        raw = mutate(rng, data[start:-24], samples)
        return data[:start] + raw + pack_trailer(raw)

    def block(rng: random.Random) -> bytes:
        """Change one block, and tell the truth of its length and checksum in the footer."""
        data = rng.choice(samples)
        index = parse_index(data, "fuzz")
        start, count = index.footer_offset, sum(len(log.blocks) for log in index.logs)
        foot = data[start:-TRAILER_SIZE]
        table = np.frombuffer(foot, BLOCK, count, len(foot) - count * BLOCK.itemsize).copy()
        ends = HEADER_SIZE + np.cumsum(table["length"], dtype=np.int64)
        at = rng.randrange(count)
        end = int(ends[at])
        begin, entry = end - int(table["length"][at]), table[at : at + 1]
        raw = data[begin:end]
        if int(entry["flags"][0]) & CODEC_MASK == CODEC_ZSTD:
            raw = zstandard.ZstdDecompressor().decompress(raw)
        raw = stored = mutate(rng, raw, [raw]) or b"\0"
        codec, raw_length = CODEC_STORED, len(raw)
        if rng.random() < 0.4:
            codec, stored = CODEC_ZSTD, zstandard.ZstdCompressor().compress(raw)
            if rng.random() < 0.5:
                stored = mutate(rng, stored, [stored]) or b"\0"
                raw_length = rng.choice((1, raw_length, 80 << 20))
        entry["flags"] = int(entry["flags"][0]) & ~CODEC_MASK | codec
        entry["length"], entry["raw_length"], entry["checksum"] = len(stored), raw_length, google_crc32c.value(stored)
        if rng.random() < 0.2:
            entry["records"] = rng.choice((1, 2, 1 << 20, int(entry["records"][0]) + 1))
        foot = foot[: len(foot) - count * BLOCK.itemsize] + table.tobytes()
        return data[:begin] + stored + data[end:start] + foot + pack_trailer(foot)

    def decode(data: bytes) -> None:
        for *_, batch in decode_segment(data, "fuzz"):
            assert batch.schema == CHANGE_SCHEMA
            batch.validate(full=True)

    return Target("segment", decode, samples, footer, block, block)


def _framed(frame: Any, samples: list[bytes]) -> Mutated:
    """Mutate the JSON of a record and frame it again; sometimes what a writer would refuse to frame."""

    def body(data: bytes) -> Any:
        length, _ = struct.unpack_from("<II", data, len(data) - 20)
        return json.loads(zstandard.decompress(data[len(data) - 20 - length : len(data) - 20]))

    bodies = [body(data) for data in samples]

    def make(rng: random.Random) -> bytes:
        raw = to_text(rng, mutate_json(rng, rng.choice(bodies)))
        if rng.random() < 0.2:
            raw = mutate(rng, raw, [raw])
        stored = zstandard.compress(raw, 1)
        declared = len(raw) if rng.random() < 0.9 else rng.choice((0, 1, 1 << 20, 0xFFFFFFFF))
        front = frame.magic + stored + struct.pack("<II", len(stored), declared)
        return front + struct.pack("<I8s", google_crc32c.value(front), frame.end)

    return make


def _manifest() -> Target:
    samples = _golden("manifest_*.dstl")
    name = manifest_name(3)
    return Target(
        "manifest", lambda data: decode_record(data, name), samples, *[_framed(manifest_format._FRAME, samples)] * 3
    )


def _files() -> Target:
    """Records of files, applied to an index, and their places looked at; what they name is bounded."""
    handles = [
        SegmentHandle(name, 5, 0) for name in ("a/b.seg", "plain:offsets/0", elsewhere("/jobs/x/_dstl", "c.seg"))
    ]
    paths = ("state/0/0/1.changelog", "offsets/0", ".forks/dstl%3A%2F%2Fx/c.seg")
    rows = [FileEntry(path, 5, 1, handle, "l", 1) for path, handle in zip(paths, handles, strict=True)]
    bodies = [FileRecord.of("commits/0", "r", rows[:count], ["metadata"], is_whole=count == 3) for count in (0, 2, 3)]
    fields: dict[str, Any] = {"kind": "files", "epoch": 1, "put_id": "p", "query_id": "files", "created_at": 0}
    name, origins = manifest_name(3), Origins("dstl:///jobs/query", ["dstl://bucket/x"], lambda location: None)  # type: ignore
    samples = [encode_record(ManifestRecord(sequence=3, files=body, **fields)) for body in bodies]

    def decode(data: bytes) -> None:
        found = decode_record(data, name).files
        index = FileIndex()
        for sequence, body in enumerate((bodies[1], found or bodies[0], bodies[2])):
            index.apply(body, sequence)
            for each in index:
                assert len(each.path) <= 512, each.path
                assert not {"", ".", ".."} & set(each.path.split("/")), each.path
                place = foreign_object(each.segment.name)
                if place is not None and origins.allows(place[0]):
                    assert place[0].startswith(("/jobs/", "s3://bucket/x")), place
                    assert "/../" not in f"{place[0]}/", place
            for front in ("", "state", "state/0", "offsets/0/x"):
                assert all(index.tree.count(front, inner) for inner in index.tree.names(front))
        index.apply(bodies[0].model_copy(update={"is_whole": True}), 3)
        assert (len(index), index.tree.names("")) == (0, ())
        index.take_free(4)

    return Target("files", decode, samples, *[_framed(manifest_format._FRAME, samples)] * 3)


def _savepoint() -> Target:
    samples = _golden("savepoint_v1*.dstl")

    def decode(data: bytes) -> None:
        (decode_marker if len(data) % 2 else decode_savepoint)(data, "before-upgrade", "fuzz://")

    return Target("savepoint", decode, samples, *[_framed(savepoint_format._FRAME, samples)] * 3)


def _base() -> Target:
    samples = _golden("savepoint_v1.base")

    def sealed(rng: random.Random) -> bytes:
        """Mutate a page below its compression, and tell the truth of its lengths; sometimes not of its rows.

        One in ten lies in its values alone: what all others are refused for is not the end of the way.
        """
        rows, is_true = rng.choice((1, 2, 3)), rng.random() < 0.1
        lies = () if is_true else (40_000, 0xFFFFFFFF)
        lengths = [rng.choice((0, 1, 2, 200, *lies)) for _ in range(2 * rows)]
        lengths += [rng.choice((0, 1, 200, 40_000, *lies)) for _ in range(rows)]
        values = mutate(rng, b"y" * min(99_999, sum(lengths[2 * rows :])), samples)
        frames = [zstandard.compress(values[at : at + FRAME_BYTES], 1) for at in range(0, len(values), FRAME_BYTES)]
        before = struct.pack(f"<{rows}H{3 * rows}I", *range(rows), *lengths)
        before += struct.pack(f"<{len(frames[:-1])}I", *map(len, frames[:-1]))
        head = before + b"x" * min(5000, sum(lengths[: 2 * rows]))
        head = head if is_true else mutate(rng, head, samples)
        stored = [zstandard.compress(head, 1), b"".join(frames)]

        def told(truth: int) -> int:
            return truth if is_true or rng.random() < 0.9 else rng.choice((0, 1, 14, 1 << 26, 0xFFFFFFFF))

        sizes = sum(lengths[:rows]), len(head) - len(before) - sum(lengths[:rows]), len(values)
        numbers = [told(rows), *map(told, (*(max(0, size) & 0xFFFFFFFF for size in sizes), *map(len, stored)))]
        block = KeyGroupBlock(*numbers, google_crc32c.value(b"".join(stored)))
        blocks = [block] * rng.choice((1, 1, 1, 2))
        raw = raw_index(blocks, [(rng.choice((0, 0, 1)), b"k" * rng.randrange(3)) for _ in blocks])
        raw = raw if is_true or rng.random() < 0.7 else mutate(rng, raw, samples)
        totals = sum(b.rows for b in blocks), sum(b.head + b.values for b in blocks), told(len(raw))
        end = seal_index(zstandard.compress(raw, 1), 0, told(len(blocks)), *totals)
        return b"".join((MAGIC, *stored * len(blocks), *end))

    def decode(data: bytes) -> None:
        index = read_index(data, len(data), 0, name="b")
        assert isinstance(index, KeyGroupIndex)
        for page in base_file.open_key_group(data, 0)[1]:
            page.validate(full=True)
        for block, start in zip(index.blocks, index.starts, strict=False):
            list(block.find(memoryview(data)[start:], [(0, b""), (0, b"x"), (1, b"xx")], "b"))

    return Target("base", decode, samples, sealed)


def _table_index() -> Target:
    samples = _golden("table_index_v1.base")

    def parts(data: bytes) -> tuple[tuple[Any, ...], Any, bytes]:
        fields = base_index._HEADER.unpack_from(data)
        raw = zstandard.decompress(data[base_index._HEADER.size : -4])
        (length,) = struct.unpack_from("<I", raw)
        return fields, json.loads(raw[4 : 4 + length]), raw[4 + length :]

    fields, description, rest = parts(samples[0])

    def sealed(rng: random.Random) -> bytes:
        text = to_text(rng, mutate_json(rng, description))
        if rng.random() < 0.2:
            text = mutate(rng, text, samples)
        raw = struct.pack("<I", len(text) if rng.random() < 0.9 else rng.randrange(1 << 32)) + text + rest
        stored = zstandard.compress(raw, 1)
        front = base_index._HEADER.pack(*fields[:-2], len(stored), len(raw)) + stored
        return front + struct.pack("<I", google_crc32c.value(front))

    return Target("table_index", lambda data: decode_index(data, [], "fuzz"), samples, sealed, sealed)


def _frame() -> Target:
    headers = [{"call": "begin", "task": ["q", "r", "op", 1, 0, 1, 1], "pid": 4}, {"error": ["Fenced", "gone"]}, {}]
    samples = [b"".join(map(bytes, encode_frame(header, b"payload"))) for header in headers]

    def decode(data: bytes) -> None:
        frame_length(data[:4].ljust(4, b"\0"))
        sealed = Framing(FrameMac(b"k" * 32), FrameMac(b"k" * 32))
        header, _ = decode_body(data[4:])
        all_of(lambda: raise_for(header), lambda: sealed.decode(data[4:]))

    return Target("frame", decode, samples)


def _calls() -> dict[str, type[Call[Any]]]:
    found = {}
    for module in (messages, fleet_messages):
        for value in vars(module).values():
            if isinstance(value, type) and issubclass(value, Call) and isinstance(getattr(value, "reply", None), type):
                found[value.name] = value
    return found


def _message() -> Target:
    calls = _calls()
    task = messages.TaskAttempt("q", "r", "op", 1, 0, 1, 1)
    known = [messages.Begin(task, 4, "host"), messages.Acknowledgement(task, 3, 12, broadcast=b"digest")]
    plain = [encode_message(call)[0] for call in known]
    plain += [{CALL: name, **dict.fromkeys(kind.__dataclass_fields__, 0)} for name, kind in calls.items()]  # type: ignore[attr-defined]
    samples = [msgpack.packb(header) for header in plain]

    def changed(rng: random.Random) -> bytes:
        value = mutate_json(rng, json.loads(json.dumps(rng.choice(plain), default=lambda raw: raw.decode())))
        try:
            return bytes(msgpack.packb(value))
        except (OverflowError, ValueError):
            return samples[0]  # beyond what msgpack can say

    def decode(data: bytes) -> None:
        header, payload = decode_body(struct.pack(">I", len(data)) + data)
        kind = calls.get(str(header.pop(CALL, "")))
        for each in [kind] if kind else calls.values():
            all_of(
                partial(decode_message, each, dict(header), payload),
                partial(decode_message, reply_of(each), dict(header), payload),
            )

    return Target("message", decode, samples, changed, changed)


def _rocksdb() -> Target:
    """Files of a table that somebody else has made: they may kill the child that reads them, and nothing else."""
    return Target("rocksdb", rocksdb_files.read, [], rocksdb_files.changed, cost=50)


def _columns() -> Target:
    samples = [
        bytes(write_columns(VALUE_COLUMN, [pa.array(values, pa.binary())]))
        for values in ([], [b"a", None, b"bcd"], [b"x" * 100] * 20)
    ]
    return Target("columns", lambda data: read_columns(memoryview(data), VALUE_COLUMN), samples)


def _rows() -> Target:
    ddl = "a long, s string, d decimal(30,2), l array<int>, m map<string,int>, t timestamp, x struct<y: float, z: int>"
    older, newer = parse_ddl("a int, s string"), parse_ddl(ddl)
    value, key = ValueCodec("v", [older, newer], write_time_ms=5), KeyCodec(parse_ddl("s string, n long, b binary"))
    columns = ValueColumns("v", [parse_ddl("a int, s string"), parse_ddl("a long, s string, f double")])
    row = (7, "text", None, [1, 2], {"k": 1}, None, (1.5, 2))
    samples = [value.encode(row), ValueCodec("v", [older]).encode((1, "x")), key.encode(("a", 1, b"b")), b""]

    def decode(data: bytes) -> None:
        both = pa.array([data, None, data[::-1]], pa.binary())
        all_of(partial(value.decode, data), partial(key.decode, data), partial(columns.decode, both))

    return Target("row", decode, samples)


def _registry() -> Target:
    registry = StateRegistry(parse_ddl("k string"))
    registry.declare("total", StateKind.VALUE, parse_ddl("n long"))
    registry.declare("seen", StateKind.MAP, parse_ddl("n long"), parse_ddl("u string"), 1000)
    plain = registry.to_wire()
    schema = json.loads(schema_to_json(parse_ddl("a long, l array<struct<x: int>>, m map<string, decimal(10,2)>")))
    samples = [json.dumps(plain).encode(), json.dumps(schema).encode()]

    def changed(rng: random.Random) -> bytes:
        return to_text(rng, mutate_json(rng, rng.choice((plain, schema))))

    def decode(data: bytes) -> None:
        text = data.decode("utf-8", "replace")
        try:
            found = json.loads(text)
        except (ValueError, RecursionError):
            found = text
        all_of(lambda: schema_from_json(text, "fuzz"), lambda: StateRegistry.from_wire(found))

    return Target("registry", decode, samples, changed, changed)


def _name() -> Target:
    samples = [
        b"s3://bucket/a/b", b"/tmp/x/../y", b"file:///x%2e%2e/y", b"s3://key:secret@bucket/x", b"memory://a,memory://b",
        manifest_name(7).encode(), b"savepoints/a/savepoint.dstl", b"../../etc/passwd", b"a/%2e%2e/b", b"a\0b", b"a//b",
    ]  # fmt: skip

    def decode(data: bytes) -> None:
        text = data.decode("utf-8", "surrogateescape")
        for read in (split_locations, parse_savepoint_location, manifest_sequence, is_savepoint_object):
            with suppress(DstlError):
                read(text)
        checked = check_name(text)
        parts = checked.split("/")
        assert not {"", ".", ".."} & set(parts), checked
        assert checked.isascii(), checked
        assert not set(checked) & set("%\0\\"), checked

    return Target("name", decode, samples)


TARGETS = {
    target.name: target
    for target in (
        _segment(), _manifest(), _files(), _savepoint(), _base(), _table_index(), _rocksdb(), _frame(), _message(),
        _columns(),
        _rows(), _registry(), _name(),
    )
}  # fmt: skip
