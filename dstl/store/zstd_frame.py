"""Decompression of zstd frames that nobody vouches for."""

from __future__ import annotations

import threading

import zstandard

__all__ = ["decompress"]

_MAX_WINDOW = 1 << 27
_local = threading.local()


def decompress(stored: bytes | memoryview, size: int, *, max_size: int) -> bytes:
    """Return what one zstd frame holds; nothing is allocated before its sizes are checked. Any thread.

    Args:
        stored: The frame, which states its size, and nothing behind it.
        size: The bytes that it must hold.
        max_size: Most bytes that the format allows.

    Raises:
        ValueError: It is not such a frame.
    """
    if size > max_size:
        raise ValueError(f"{size} bytes are declared where {max_size} are allowed")
    try:
        # The library believes the size in the frame and ignores max_output_size then, so the frame is asked first.
        frame = zstandard.get_frame_parameters(stored)
        if frame.content_size != size:
            raise ValueError(f"a frame of {frame.content_size} bytes instead of {size}")
        if frame.window_size > _MAX_WINDOW or frame.dict_id:
            raise ValueError("a frame with a window or dictionary that is never written")
        decompressor = getattr(_local, "decompressor", None)
        if decompressor is None:
            decompressor = _local.decompressor = zstandard.ZstdDecompressor()
        raw: bytes = decompressor.decompress(stored, max_output_size=size, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise ValueError(str(error)) from None
    if len(raw) != size:
        raise ValueError(f"{len(raw)} bytes instead of {size}")
    return raw
