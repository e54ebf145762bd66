"""Frames that lie about their size, or are more than a frame, are refused before anything is allocated."""

from __future__ import annotations

import random
import tracemalloc

import numpy as np
import pytest
import zstandard

from dstl.store.zstd_frame import decompress, decompress_frames_into


def packed(raw: bytes, **options: bool) -> bytes:
    return zstandard.ZstdCompressor(level=1, **options).compress(raw)


def test_a_frame_gives_back_what_was_packed(rng: random.Random) -> None:
    for size in (1, 100, 70_000):
        raw = rng.randbytes(size)
        assert decompress(packed(raw), size, max_size=size) == raw
        assert decompress(memoryview(packed(raw)), size, max_size=size) == raw


def test_another_size_than_the_declared_is_refused() -> None:
    frame = packed(b"x" * 1000)
    for size in (999, 1001, 0, 1 << 40):
        with pytest.raises(ValueError, match="bytes"):
            decompress(frame, size, max_size=1 << 20)
    with pytest.raises(ValueError, match="1000 bytes are declared where 999 are allowed"):
        decompress(frame, 1000, max_size=999)


def test_a_frame_that_does_not_say_its_size_is_refused() -> None:
    with pytest.raises(ValueError, match="instead of 1000"):
        decompress(packed(b"x" * 1000, write_content_size=False), 1000, max_size=1000)


def test_bytes_before_in_or_behind_the_frame_are_refused(seed: int) -> None:
    raw = random.Random(seed).randbytes(500)
    frame = packed(raw)
    for wrong in (frame[:-1], frame + b"\0", b"\0" + frame, frame + frame, b""):
        with pytest.raises(ValueError):  # noqa: PT011  (the library's own words)
            decompress(wrong, 500, max_size=500)


def test_nothing_is_allocated_for_a_size_that_is_refused() -> None:
    """Some kilobytes can say that they are a gigabyte, and be it."""
    frame = packed(bytes(200 << 20))
    assert len(frame) < 1 << 16
    tracemalloc.start()
    try:
        for size in (1000, 200 << 20):
            with pytest.raises(ValueError, match="bytes"):
                decompress(frame, size, max_size=1 << 20)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("size", [70_000, 30_000, 35_000])
def test_what_was_packed_fills_an_array_and_nothing_beside_it(size: int, seed: int) -> None:
    raw = random.Random(seed).randbytes(70_000)
    frames = b"".join(packed(raw[at : at + size]) for at in range(0, len(raw), size))
    found = np.zeros(len(raw) + 2, np.uint8)
    decompress_frames_into(memoryview(frames), found[1:-1], size)
    assert found.tobytes() == b"\0" + raw + b"\0"
    for wrong in (frames[:-1], frames[:50], b"\0" + frames, b""):
        with pytest.raises(ValueError):  # noqa: PT011  (the library's own words)
            decompress_frames_into(wrong, found[1:-1], size)
    for room in (len(raw) - 1, len(raw) + 1):
        if room > len(raw) or size == len(raw):
            with pytest.raises(ValueError, match="bytes"):
                decompress_frames_into(frames, np.zeros(room, np.uint8), size)
