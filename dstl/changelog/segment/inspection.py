"""A segment described in plain values: behind ``dstl segment show`` and ``dump``."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

from dstl.changelog.change_set import META_KEY_GROUP
from dstl.changelog.segment.encoder import segment_checksum
from dstl.changelog.segment.reader import decode_segment, verify_segment
from dstl.errors import CorruptData, Invalid, ObjectNotFound
from dstl.options import S3Options, SealingOptions
from dstl.runtime import closed_after
from dstl.store.base import ByteRange, ObjectStore
from dstl.store.location import absolute_location, has_scheme, open_store
from handles.key_group import KeyGroupRange

_OPS = ("put", "delete", "clear", "metadata")


async def fetch_segment(
    source: str,
    offset: int = 0,
    size: int | None = None,
    options: S3Options | None = None,
    sealing: SealingOptions | None = None,
) -> bytes:
    """Return a segment's bytes from a file or from any location of :func:`~dstl.store.location.open_store`.

    A seal covers the object's name below its location, which nothing here says: with a key, one directory after the
    other is tried as the location, from the object's own upwards.

    Args:
        source: Path of a file, or URL of an object.
        offset: Where the segment starts, for one inside a manifest.
        size: Its length; None for all the rest.
        options: How S3 is reached.
        sealing: The key of sealed objects.

    Raises:
        ObjectNotFound: Nothing is there.
        Invalid: Not a location, or a range that cannot be.
        CorruptData: No holder of the key has stored it.
        Unavailable: The store did not answer.
    """
    if offset < 0 or (size is not None and size < 1):
        raise Invalid(f"no segment has offset {offset} and size {size}")
    if sealing is not None and sealing.key_file is not None:
        where = await asyncio.to_thread(absolute_location, source)
        return await _fetch_sealed(where, offset, size, options, sealing)
    if has_scheme(source):
        location, _, name = source.rpartition("/")
        return await _fetch(open_store(location, options, sealing), name, offset, size)
    data = await asyncio.to_thread(_read_file, source)
    return data[offset : None if size is None else offset + size]


async def _fetch_sealed(
    source: str, offset: int, size: int | None, options: S3Options | None, sealing: SealingOptions
) -> bytes:
    location, _, name = source.rpartition("/")
    while True:
        try:
            return await _fetch(open_store(location, options, sealing), name, offset, size)
        except CorruptData:
            location, _, folder = location.rpartition("/")
            if not folder or not location.rpartition("://")[2]:
                raise
            name = f"{folder}/{name}"


def _read_file(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except FileNotFoundError:
        raise ObjectNotFound(f"{path}: no such file") from None
    except OSError as error:
        raise Invalid(f"{path}: {error.strerror}; name a file that can be read") from None


async def _fetch(store: ObjectStore, name: str, offset: int, size: int | None) -> bytes:
    async with closed_after(store):
        stop = (await store.head(name)).size if size is None else offset + size
        if stop <= offset:
            raise Invalid(f"{store.location}: {name} has {stop} bytes, nothing starts at {offset}")
        return await store.get(name, ByteRange(offset, stop))


def describe_segment(data: bytes, where: str) -> dict[str, object]:
    """Check every byte of a segment and return what its index says, ready for JSON.

    Raises:
        CorruptData: The bytes are not what was written.
        Invalid: Another major format version wrote it.
    """
    index = verify_segment(data, where)
    return {
        "format": "{}.{}".format(*index.version),
        "size": len(data),
        "checksum": f"{segment_checksum(data):08x}",
        "writer_id": index.writer_id,
        "metadata": dict(index.metadata),
        "logs": [
            {
                "log_id": log.log_id,
                "from_sqn": log.sqns.from_sqn,
                "to_sqn": log.sqns.to_sqn,
                "changes": sum(block.records for block in log.blocks),
                "blocks": [
                    {
                        "key_groups": _key_groups(block.first_key_group, block.last_key_group),
                        "from_sqn": block.sqns.from_sqn,
                        "to_sqn": block.sqns.to_sqn,
                        "changes": block.records,
                        "offset": block.offset,
                        "length": block.length,
                        "raw_length": block.raw_length,
                        "codec": ("stored", "zstd")[block.codec],
                    }
                    for block in log.blocks
                ],
            }
            for log in index.logs
        ],
    }


def dump_segment(
    data: bytes, where: str, *, log_id: str | None = None, key_groups: KeyGroupRange | None = None
) -> Iterator[dict[str, object]]:
    """Yield the changes of a segment, or of one log and some key groups, one by one; bytes as hexadecimal digits.

    Raises:
        CorruptData: Before anything was yielded: the bytes are not what was written.
        Invalid: Another major format version wrote it.
    """
    for log, sqn, key_group, batch in decode_segment(data, where):
        is_meta = key_group == META_KEY_GROUP
        if log_id not in (None, log) or not (is_meta or key_groups is None or key_group in key_groups):
            continue
        for row in batch.to_pylist():
            yield {
                "log_id": log,
                "sqn": sqn,
                "key_group": None if is_meta else key_group,
                "op": _OPS[row["op"]],
                "state": row["state"],
                **{name: row[name].hex() for name in ("key", "user_key", "value")},
            }


def parse_key_groups(text: str) -> KeyGroupRange:
    """Return the range that ``7`` or ``0-15`` (both ends included) names.

    Raises:
        Invalid: It names none.
    """
    first, dash, last = text.partition("-")
    try:
        return KeyGroupRange(int(first), int(last if dash else first))
    except ValueError:
        raise Invalid(f"not a range of key groups: {text!r}; write 7 or 0-15") from None


def _key_groups(first: int, last: int) -> str:
    if first == META_KEY_GROUP:
        return "metadata"
    return str(first) if first == last else f"{first}-{last}"
