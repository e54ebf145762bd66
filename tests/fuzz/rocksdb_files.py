"""RocksDB files that somebody else has made: blocks without checksums, records of a MANIFEST under right ones."""

import random
import struct
import tempfile
from collections.abc import Iterator
from contextlib import closing
from functools import cache
from pathlib import Path

import google_crc32c
import msgpack
from fuzz.mutator import NUMBERS, mutate

from dstl.options import RocksDBOptions
from materializer.bases.file_reader import TableFileReader
from materializer.tables import RocksDBStateTable
from worlds.table_changes import changes, put

GROUPS = range(4)
_FOOTER = 53
_TRAILER = 5
_RECORD = struct.Struct("<IHB")
_WHOLE = 1
Block = tuple[int, int]


@cache
def sample() -> dict[str, bytes]:
    """Return the files of a table of some keys, by name; no block of its table files has a checksum."""
    options = RocksDBOptions(compression="none")
    with (
        tempfile.TemporaryDirectory() as directory,
        closing(RocksDBStateTable(Path(directory) / "t", options)) as table,
    ):
        table.apply(changes(*(put(group, 1, b"key%d" % i, b"", b"value" * 4) for group in GROUPS for i in range(30))))
        with closing(table.snapshot()) as snapshot:
            needed = [
                file.name for file in snapshot.files() if file.id or file.name.startswith(("CURRENT", "MANIFEST"))
            ]
            files = {name: (snapshot.path / name).read_bytes() for name in needed}
    return {name: _without_checksums(data) if name.endswith(".sst") else data for name, data in files.items()}


def blocks(data: bytes) -> list[Block]:
    """Return where the blocks of a table file are that has one of data: that one, index, meta index, and its own."""
    meta, at = _handle(data, len(data) - _FOOTER + 1)
    index, _ = _handle(data, at)
    found = [meta, index, *(_handle(value, 0)[0] for value in _values(data, *meta))]
    return [*found, (0, min(start for start, _ in found) - _TRAILER)]


def unpack(packed: bytes) -> dict[str, bytes]:
    """Return files by name."""
    files: dict[str, bytes] = msgpack.unpackb(packed)
    return files


def read(packed: bytes) -> None:
    """Read packed files as a restore does: all of them checked, then key group by key group."""
    with tempfile.TemporaryDirectory() as directory:
        for name, data in unpack(packed).items():
            (Path(directory) / name).write_bytes(data)
        with closing(TableFileReader(Path(directory), "fuzz")) as reader:
            list(reader.check())
            for group in GROUPS:
                for page in reader.entries(group):
                    page.validate(full=True)


def changed(rng: random.Random) -> bytes:
    """Return files of which one is not as it was, packed."""
    files = sample()
    name = rng.choice([name for name in files for _ in range(5 if name.endswith(".sst") else 1)])
    data = files[name]
    if name.startswith("MANIFEST"):
        records = list(_records(data))
        at = rng.randrange(len(records))
        records[at] = mutate(rng, records[at], records)[:32_000]
        data = b"".join(map(_record, records))
    elif name.endswith(".sst"):
        data = _changed_block(rng, bytearray(data))
    else:
        data = mutate(rng, data, [data])
    return bytes(msgpack.packb({**files, name: data}))


def _changed_block(rng: random.Random, data: bytearray) -> bytes:
    start, size = rng.choice(blocks(data))
    for _ in range(rng.choice((1, 1, 2, 3))):
        kind, number = rng.randrange(4), rng.choice((*NUMBERS, size, size // 4))
        if kind == 0:  # how many restart points the block has, or where the last one is
            at = start + size - 4 * rng.randrange(1, 3)
            struct.pack_into("<I", data, at, number)
        elif kind == 1:  # the lengths of the first entries
            at = start + rng.randrange(min(size, 12))
            data[at : at + 5] = _varint(number).ljust(5, b"\0") if rng.random() < 0.5 else rng.randbytes(5)
        elif kind == 2:  # how the block is compressed
            data[start + size] = rng.choice((0, 1, 2, 4, 7, 0xFF))
        else:
            data[start + rng.randrange(size)] = rng.randrange(256)
    if rng.random() < 0.2:
        at = len(data) - _FOOTER + rng.randrange(1, 41)
        data[at] = rng.randrange(256)
    return bytes(data)


def _without_checksums(data: bytes) -> bytes:
    found = bytearray(data)
    found[len(data) - _FOOTER] = 0
    for start, size in blocks(data):
        found[start + size + 1 : start + size + 5] = bytes(4)
    return bytes(found)


def _values(data: bytes, start: int, size: int) -> Iterator[bytes]:
    (restarts,) = struct.unpack_from("<I", data, start + size - 4)
    at = start
    while at < start + size - 4 - 4 * restarts:
        _, at = _number(data, at)
        own, at = _number(data, at)
        length, at = _number(data, at)
        at += own + length
        yield data[at - length : at]


def _handle(data: bytes, at: int) -> tuple[Block, int]:
    start, at = _number(data, at)
    size, at = _number(data, at)
    return (start, size), at


def _number(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while data[at] & 0x80:
        value, shift, at = value | (data[at] & 0x7F) << shift, shift + 7, at + 1
    return value | data[at] << shift, at + 1


def _varint(number: int) -> bytes:
    found = b""
    while number >= 0x80:
        found, number = found + bytes([number & 0x7F | 0x80]), number >> 7
    return found + bytes([number])


def _records(data: bytes) -> Iterator[bytes]:
    at = 0
    while at + _RECORD.size <= len(data):
        _, length, _ = _RECORD.unpack_from(data, at)
        at += _RECORD.size
        yield data[at : at + length]
        at += length


def _record(body: bytes) -> bytes:
    crc = google_crc32c.value(bytes([_WHOLE]) + body)
    masked = ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF
    return _RECORD.pack(masked, len(body), _WHOLE) + body
