"""The segment format in one place: what encodes, indexes and decodes. The bytes are in ``handles/FORMAT.md``."""

from dstl.changelog.block_codec import Block, decode_block
from dstl.changelog.segment_decoder import decode_segment, parse_index, verify_segment
from dstl.changelog.segment_encoder import encode_segment, segment_checksum
from dstl.changelog.segment_index import FORMAT_MAJOR, FORMAT_MINOR, BlockEntry, LogIndex, SegmentIndex

__all__ = [
    "FORMAT_MAJOR",
    "FORMAT_MINOR",
    "Block",
    "BlockEntry",
    "LogIndex",
    "SegmentIndex",
    "decode_block",
    "decode_segment",
    "encode_segment",
    "parse_index",
    "segment_checksum",
    "verify_segment",
]
