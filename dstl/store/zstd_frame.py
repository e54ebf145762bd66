"""Decompression of untrusted zstd frames."""

from __future__ import annotations

import threading

import numpy as np
import numpy.typing as npt
import zstandard

_MAX_WINDOW = 1 << 27  # the largest that zstd's own levels write
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
    _check_frame(stored, size, max_size)
    try:
        raw: bytes = _decompressor().decompress(stored, max_output_size=size, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise ValueError(str(error)) from None
    if len(raw) != size:
        raise ValueError(f"{len(raw)} bytes instead of {size}")
    return raw


def decompress_frames_into(stored: bytes | memoryview, raw: npt.NDArray[np.uint8], frame: int) -> None:
    """Fill an array with what zstd frames back to back hold. Any thread.

    What stands behind the last one is not looked at, so the caller has a checksum of the whole.

    Args:
        stored: The frames.
        raw: Must be filled.
        frame: Bytes of each, except that the last has fewer.

    Raises:
        ValueError: They are not such frames.
    """
    _check_frame(stored, min(frame, len(raw)), frame)
    try:
        # There is room for a whole frame each time, so the library writes it there in one pass.
        with _decompressor().stream_reader(stored, read_across_frames=True) as reader:
            length = reader.readinto(raw)
    except zstandard.ZstdError as error:
        raise ValueError(str(error)) from None
    if length != len(raw):
        raise ValueError(f"{length} bytes instead of {len(raw)}")


def _check_frame(stored: bytes | memoryview, size: int, max_size: int) -> None:
    if size > max_size:
        raise ValueError(f"{size} bytes are declared where {max_size} are allowed")
    try:
        # The library believes the size in the frame and ignores max_output_size then, so the frame is asked first.
        frame = zstandard.get_frame_parameters(stored)
    except zstandard.ZstdError as error:
        raise ValueError(str(error)) from None
    if frame.content_size != size:
        raise ValueError(f"a frame of {frame.content_size} bytes instead of {size}")
    if frame.window_size > _MAX_WINDOW or frame.dict_id:
        raise ValueError("a frame with a window or dictionary that is never written")


def _decompressor() -> zstandard.ZstdDecompressor:
    decompressor: zstandard.ZstdDecompressor | None = getattr(_local, "decompressor", None)
    if decompressor is None:
        decompressor = _local.decompressor = zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW)
    return decompressor
