"""Encoding of change sets of many logs as the bytes of one segment."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import accumulate, groupby, islice
from operator import itemgetter
from typing import Any

import google_crc32c
import numpy as np
import pyarrow as pa
import zstandard

from dstl.changelog.change_set import META_KEY_GROUP, ChangeSet
from dstl.changelog.segment.block_codec import Bytes, compress_block
from dstl.changelog.segment.grouped_batch import GroupedBatch, Piece, Runs, encode_columns
from dstl.changelog.segment.index import (
    HEADER_SIZE,
    BlockEntry,
    BlockTable,
    LogIndex,
    pack_footer,
    pack_header,
    pack_trailer,
)
from dstl.errors import Invalid
from handles.segment_handle import SequenceNumber, SequenceNumberRange

_SMALL_BLOCK = 256 << 10
"""Key groups of a log share a block below this many raw bytes: a frame and an index entry for each would outweigh
them, and a restore decodes 128 blocks of 70 KiB in twice the time of the same bytes in blocks of up to 256. A reader of
one key group decodes at most that much more."""
_LARGE_BLOCK = 4 << 20
"""A key group's changes are split at this many raw bytes, so that a reader can fetch and decode them side by side."""
_SMALL_BATCH = 1 << 15
"""Batches are joined up to this many changes, or the bytes above, before they are grouped."""
_SCRATCH = 8 << 20  # twice a large block, whose estimate of its own size may be short

EncodedBlocks = list[tuple[BlockEntry, bytes]]
"""Blocks of one log in their order, each with its index entry, whose offset is not known yet, and its stored bytes."""

_Sets = list[tuple[SequenceNumber, ChangeSet]]
_Numbered = list[tuple[int, pa.RecordBatch]]
_local = threading.local()


def segment_checksum(segment: bytes) -> int:
    """Return the CRC-32C that a segment's handle carries."""
    return int(google_crc32c.value(segment))


def encode_blocks(sqn: SequenceNumber, changes: ChangeSet, compression_level: int = 1) -> EncodedBlocks:
    """Encode one change set for :func:`encode_segment`. Any thread.

    Args:
        sqn: The number that it will have in its log.
        changes: The set, closed and not empty.
        compression_level: Of zstd, see ``BatchingOptions.compression_level``.
    """
    return _encode_run([(sqn, changes)], compression_level)


def encode_segment(
    sets: Sequence[tuple[str, SequenceNumber, ChangeSet]],
    *,
    writer_id: str,
    metadata: Mapping[str, str] | None = None,
    compression_level: int = 1,
    encoded: Mapping[tuple[str, SequenceNumber], EncodedBlocks] | None = None,
) -> bytes:
    """Return a segment that holds these change sets.

    Deterministic: the same sets, in any order, give the same bytes (with one version of zstd).

    Args:
        sets: Log id, sequence number and changes; none empty, no pair of log and number twice.
        writer_id: Who writes: for people, and for the cleaner.
        metadata: Further notes for the index; small.
        compression_level: Of zstd, see ``BatchingOptions.compression_level``.
        encoded: By log id and number, what :func:`encode_blocks` has made of some of the sets. One that has no
            neighbour among ``sets`` is not encoded again; blocks of neighbours hold the changes of all of them.

    Raises:
        Invalid: No sets, an empty one, or one twice.
    """
    if not sets or any(each.is_empty for _, _, each in sets):
        raise Invalid("an empty change set has no sequence number and is never written")
    ready = encoded or {}
    blocks: EncodedBlocks = []
    heads: list[tuple[str, SequenceNumberRange, int]] = []
    for log_id, members in groupby(sorted(sets, key=itemgetter(0, 1)), key=itemgetter(0)):
        for run in _adjacent(log_id, [(sqn, changes) for _, sqn, changes in members]):
            first, last = run[0][0], run[-1][0]
            found = ready.get((log_id, first)) if first == last else None
            made = found if found is not None else _encode_run(run, compression_level)
            heads.append((log_id, SequenceNumberRange(first, last + 1), len(made)))
            blocks += made
    offsets = accumulate((len(stored) for _, stored in blocks), initial=HEADER_SIZE)
    entries = (entry._replace(offset=at) for (entry, _), at in zip(blocks, offsets, strict=False))
    logs = [
        LogIndex(log_id, sqns, BlockTable.of(list(islice(entries, count)), sqns.from_sqn))
        for log_id, sqns, count in heads
    ]
    footer = pack_footer(writer_id, metadata or {}, logs)
    return b"".join((pack_header(), *(stored for _, stored in blocks), footer, pack_trailer(footer)))


def _adjacent(log_id: str, members: _Sets) -> Iterator[_Sets]:
    """Cut the sets of one log, by ascending number, where numbers are missing."""
    run = members[:1]
    for each in members[1:]:
        if each[0] == run[-1][0]:
            raise Invalid(f"log {log_id} has two change sets of sequence number {each[0]}")
        if each[0] != run[-1][0] + 1:
            yield run
            run = []
        run.append(each)
    yield run


def _grouped_batches(batches: _Numbered) -> Iterator[GroupedBatch]:
    """Group batches of adjacent sets by key group, small ones joined, in order, and metadata by itself.

    A row of it among others would take their order from them, and their values' common length.
    """
    if len(batches) == 1:
        yield GroupedBatch.of(batches)
        return
    joined: _Numbered = []
    rows = nbytes = 0
    for delta, batch in batches:
        if _is_metadata(batch):
            yield GroupedBatch.of([(delta, batch)])
            continue
        size = batch.nbytes
        if joined and (rows + batch.num_rows > _SMALL_BATCH or nbytes + size > _LARGE_BLOCK):
            yield GroupedBatch.of(joined)
            joined, rows, nbytes = [], 0, 0
        joined.append((delta, batch))
        rows += batch.num_rows
        nbytes += size
    if joined:
        yield GroupedBatch.of(joined)


def _is_metadata(batch: pa.RecordBatch) -> bool:
    return bool(batch.column(0)[0].as_py() == META_KEY_GROUP)


def _plan_blocks(batches: list[GroupedBatch], base_sqn: SequenceNumber) -> Iterator[_BlockPlan]:
    """Cut the changes of one log into blocks: metadata, then key groups in ascending order."""
    groups = sorted({group for batch in batches for group in batch.rows_of})
    if groups[-1] == META_KEY_GROUP:
        groups.insert(0, groups.pop())
    plan = _BlockPlan(base_sqn)
    for group in groups:
        pieces = [Piece(batch, *batch.rows_of[group]) for batch in batches if group in batch.rows_of]
        if plan.pieces and (plan.nbytes + sum(p.nbytes for p in pieces) > _SMALL_BLOCK or plan.is_meta):
            yield plan
            plan = _BlockPlan(base_sqn)
        for piece in (part for whole in pieces for part in whole.split(_LARGE_BLOCK)):
            if plan.pieces and plan.nbytes + piece.nbytes > _LARGE_BLOCK:
                yield plan
                plan = _BlockPlan(base_sqn)
            plan.add(piece, group)
    yield plan


class _BlockPlan:
    """The rows of one block."""

    def __init__(self, base_sqn: SequenceNumber) -> None:
        self._base_sqn = base_sqn
        self.pieces: list[Piece] = []
        self._runs: Runs = []
        self.nbytes = 0
        self.is_meta = False

    def add(self, piece: Piece, group: int) -> None:
        self.nbytes += piece.nbytes
        self.is_meta = group == META_KEY_GROUP
        last = self.pieces[-1] if self.pieces else None
        if last is not None and last.batch is piece.batch and last.stop == piece.start:
            self.pieces[-1] = Piece(last.batch, last.start, piece.stop)
        else:
            self.pieces.append(piece)
        for run in piece.batch.runs(group, piece.start, piece.stop):
            if self._runs and self._runs[-1][:2] == run[:2]:
                run = (*run[:2], self._runs.pop()[2] + run[2])
            self._runs.append(run)

    def encode(self, compressor: zstandard.ZstdCompressor, scratch: Bytes) -> tuple[BlockEntry, bytes]:
        """Return the block's index entry, whose offset is not known yet, and its stored bytes."""
        raw = encode_columns(self.pieces, self._runs, scratch)
        codec, stored, checksum = compress_block(raw, compressor)
        deltas = [delta for _, delta, _ in self._runs]
        return BlockEntry(
            first_key_group=self._runs[0][0],
            last_key_group=self._runs[-1][0],
            sqns=SequenceNumberRange(self._base_sqn + min(deltas), self._base_sqn + max(deltas) + 1),
            records=sum(count for _, _, count in self._runs),
            offset=0,
            length=len(stored),
            raw_length=len(raw),
            checksum=checksum,
            codec=codec,
        ), stored


def _encode_run(run: _Sets, level: int) -> EncodedBlocks:
    """Return the blocks of adjacent sets, without their offsets."""
    base = run[0][0]
    batches = [(sqn - base, batch) for sqn, changes in run for batch in changes.batches()]
    metadata = [each for each in batches if _is_metadata(each[1])]
    if len(metadata) != 1 or metadata[0][1].num_rows != 1:
        return _encode_batches(batches, base, level)
    ((delta, row),) = metadata
    entry, stored = _encode_metadata(row.column("value")[0].as_py(), delta, level)
    first = entry._replace(sqns=SequenceNumberRange(base + delta, base + delta + 1)), stored
    others = [each for each in batches if each[1] is not row]
    return [first, *_encode_batches(others, base, level)] if others else [first]


@lru_cache(maxsize=64)
def _encode_metadata(blob: bytes, delta: int, level: int) -> tuple[BlockEntry, bytes]:
    """Return the block of one row of metadata: every log of an operator has the same, in every batch."""
    changes = ChangeSet()
    changes.append_metadata(blob)
    return _encode_batches([(delta, changes.batches()[0])], 0, level)[0]


def _encode_batches(batches: _Numbered, base: SequenceNumber, level: int) -> EncodedBlocks:
    """Return the blocks of batches, given with their numbers behind the first set's."""
    work = list(_plan_blocks(list(_grouped_batches(batches)), base))
    mine: dict[str, Any] = _local.__dict__
    if mine.get("level") != level:
        mine["level"], mine["compressor"] = level, zstandard.ZstdCompressor(level=level)
    # One buffer for all blocks of a thread: fresh pages cost more than filling them.
    needed = min(_SCRATCH, 2 * max(plan.nbytes for plan in work))
    if "scratch" not in mine or len(mine["scratch"]) < needed:
        mine["scratch"] = np.empty(needed, np.uint8)
    return [plan.encode(mine["compressor"], mine["scratch"]) for plan in work]
