"""The index of a table that is stored as the files that it lies in: its small files, and the names of the others.

A RocksDB snapshot is many large files that never change, which are objects of their own and shared by several bases,
and a few small ones (``CURRENT``, ``MANIFEST-*``, options), which are in the index. All integers are little-endian::

    index   = "DSTLTIDX" | format version u16 | flags u16 = 0 | stored size u32 | raw size u32 | stored bytes | crc u32
    stored bytes = one zstd frame that states its content size, of
    raw     = description length u32 | description | contents of the small files, back to back

The description is JSON: ``files``, the large ones as ``[id, size, checksum]``; ``contents``, the small ones as ``[name,
length]``; ``row_bytes``, the mean bytes of an entry. The crc is the CRC-32C of all bytes before it.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import google_crc32c
import zstandard
from pydantic_core import from_json

from dstl.errors import CorruptData, Invalid
from dstl.store.zstd_frame import decompress
from handles.materialized_handle import TableFile

__all__ = ["FORMAT_VERSION", "TableIndex", "decode_index", "encode_index"]

_MAGIC = b"DSTLTIDX"
FORMAT_VERSION = 1
_HEADER = struct.Struct("<8sHHII")
_U32 = struct.Struct("<I")
_MAX_RAW = 256 << 20
_SMALL_FILE = re.compile(r"CURRENT|IDENTITY|MANIFEST-[0-9]+|OPTIONS-[0-9]+|rocksdict-config\.json")


@dataclass(frozen=True, slots=True)
class TableIndex:
    """The contents of an index.

    Attributes:
        contents: The small files by name.
        files: Id, length and CRC-32C of each large file.
        row_bytes: Mean bytes of keys and value of an entry; 0 where it is not known.
    """

    contents: Mapping[str, bytes]
    files: tuple[tuple[str, int, int], ...]
    row_bytes: int = 0


def encode_index(index: TableIndex) -> bytes:
    """Return an index's bytes.

    Raises:
        Invalid: A file has a name that no reader would take.
    """
    for name in index.contents:
        if not _SMALL_FILE.fullmatch(name):
            raise Invalid(f"a table has a file {name!r}, which this version cannot store: materialize by key groups")
    description = {
        "files": index.files,
        "contents": [[name, len(data)] for name, data in index.contents.items()],
        "row_bytes": index.row_bytes,
    }
    text = json.dumps(description, separators=(",", ":")).encode()
    raw = b"".join((_U32.pack(len(text)), text, *index.contents.values()))
    stored = zstandard.ZstdCompressor(level=1).compress(raw)
    front = _HEADER.pack(_MAGIC, FORMAT_VERSION, 0, len(stored), len(raw)) + stored
    return front + _U32.pack(google_crc32c.value(front))


def decode_index(data: bytes, files: Iterable[TableFile], name: str) -> TableIndex:
    """Check an index whole and read it.

    Args:
        data: The object.
        files: The large files as the base's handle names them.
        name: Object name, for messages.

    Raises:
        CorruptData: Any byte is not what was written, or it is another base's index.
        Invalid: A newer version wrote it.
    """

    def damaged(why: str) -> CorruptData:
        return CorruptData(f"table index {name} is damaged ({why}): restore from an older base")

    if len(data) < _HEADER.size + _U32.size:
        raise damaged(f"{len(data)} bytes")
    magic, version, flags, stored_size, raw_size = _HEADER.unpack_from(data)
    end = len(data) - _U32.size
    if magic != _MAGIC or google_crc32c.value(data[:end]) != _U32.unpack_from(data, end)[0]:
        raise damaged("checksum or magic is wrong")
    if version != FORMAT_VERSION or flags:
        raise Invalid(f"table index {name} is of format {version}.{flags}, newer than {FORMAT_VERSION}: upgrade DSTL")
    stored = data[_HEADER.size : end]
    try:
        if len(stored) != stored_size:
            raise damaged("sizes do not agree")
        raw = decompress(stored, raw_size, max_size=_MAX_RAW)
        at = _U32.size + _U32.unpack_from(raw)[0]
        description = from_json(raw[_U32.size : at], allow_inf_nan=False)
        contents = {}
        for file_name, length in description["contents"]:
            if not _SMALL_FILE.fullmatch(file_name):
                raise damaged(f"a file named {file_name!r}")
            contents[file_name] = raw[at : at + length]
            at += length
        index = TableIndex(
            contents, tuple((str(f), int(s), int(c)) for f, s, c in description["files"]), int(description["row_bytes"])
        )
    except (struct.error, ValueError, TypeError, KeyError) as error:
        raise damaged(str(error)) from None
    if at != len(raw):
        raise damaged("lengths do not add up")
    if sorted(index.files) != sorted((file.id, file.size, file.checksum) for file in files):
        raise damaged("it is the index of other files than its handle names")
    return index
