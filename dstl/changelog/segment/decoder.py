"""Decoding of a whole segment in memory, checked from end to end: for small segments, offline tools and tests."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa

from dstl.changelog.segment.block_codec import decode_block
from dstl.changelog.segment.frame import check_header, unpack_footer, unpack_trailer
from dstl.changelog.segment.index import HEADER_SIZE, TRAILER_SIZE, BlockEntry, SegmentIndex
from handles.key_group import KeyGroup
from handles.sequence_number import SequenceNumber

__all__ = ["decode_segment", "parse_index", "verify_segment"]


def parse_index(data: bytes, where: str) -> SegmentIndex:
    """Return the index of a whole segment; header, trailer and footer are checked, blocks are not.

    Raises:
        CorruptData: The bytes are not what was written.
        Invalid: Another major format version wrote it.
    """
    trailer = unpack_trailer(data[-TRAILER_SIZE:], where, len(data))
    check_header(data[:HEADER_SIZE], where, trailer.version)
    end = len(data) - TRAILER_SIZE
    return unpack_footer(data[end - trailer.footer_length : end], where, trailer, len(data))


def verify_segment(data: bytes, where: str) -> SegmentIndex:
    """Check every byte of a segment, decode every block and return its index.

    Raises:
        CorruptData: The bytes are not what was written.
        Invalid: Another major format version wrote it.
    """
    index = parse_index(data, where)
    for log in index.logs:
        for entry in log.blocks:
            decode_block(_stored_bytes(data, entry), entry, log.sqns.from_sqn, where)
    return index


def decode_segment(data: bytes, where: str) -> Iterator[tuple[str, SequenceNumber, KeyGroup, pa.RecordBatch]]:
    """Yield log id, sequence number, key group and changes of a whole segment that is checked first.

    In the order of :meth:`SegmentReader.read <dstl.changelog.segment.reader.SegmentReader.read>`.

    Raises:
        CorruptData: Before anything was yielded: the bytes are not what was written.
        Invalid: Another major format version wrote it.
    """
    index = verify_segment(data, where)
    for log in index.logs:
        for entry in log.blocks:
            block = decode_block(_stored_bytes(data, entry), entry, log.sqns.from_sqn, where)
            for key_group, sqn, batch in block.slices():
                yield log.log_id, sqn, key_group, batch


def _stored_bytes(data: bytes, entry: BlockEntry) -> bytes:
    return data[entry.offset : entry.offset + entry.length]
