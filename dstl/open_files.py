"""The limit of the files that a process may have open: sockets, objects of a store and files of tables alike."""

from __future__ import annotations

import resource
from contextlib import suppress

_ENOUGH = 1 << 20  # where there is no limit; macOS refuses to be asked for more than it has


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
