"""Open files that a process may have, and memory that it need not give back."""

from __future__ import annotations

import ctypes
import functools
import resource
from contextlib import suppress

_ENOUGH = 1 << 20  # where there is no limit; macOS refuses to be asked for more than it has

_M_TRIM_THRESHOLD = -1  # of glibc's malloc.h
_M_MMAP_THRESHOLD = -3  # the same
_LARGEST_ON_HEAP = 32 << 20
"""Bytes of a block that comes from the heap. This, and the double for what the heap keeps at its end, is what glibc
arrives at by itself once a process has freed a block of that size."""


def open_file_limit() -> int:
    """Return how many files this process may have open."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _ENOUGH if soft == resource.RLIM_INFINITY else soft


def raise_open_file_limit() -> None:
    """Let this process open as many files as it may allow itself.

    Shells begin with 1,024, or 256, for programs that call ``select``; nothing here does, and tables of several
    operators have as many.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _ENOUGH if hard == resource.RLIM_INFINITY else hard
    if soft not in (resource.RLIM_INFINITY, hard):
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, most), hard))


@functools.cache
def keep_freed_memory() -> None:
    """Let this process keep the columns of a batch that it has freed, for the next one (glibc only).

    By default glibc gives blocks from 128 KB on back at once, and the heap's end from twice the largest of them: each
    batch then has the kernel clear its pages anew, a fifth of a worker's time.
    """
    with suppress(AttributeError, OSError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_MMAP_THRESHOLD, _LARGEST_ON_HEAP)
        mallopt(_M_TRIM_THRESHOLD, 2 * _LARGEST_ON_HEAP)
