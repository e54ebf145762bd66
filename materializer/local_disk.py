"""The local disk of a TaskManager: its cache of bases, the files that it has fetched, and the tables in files.

Every access to it is announced here, so that a simulation can let it fail: a full disk, a broken one. Outside of a
simulation nobody listens. The file system that is a *store* is another thing (``dstl.store.local``).
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from contextvars import ContextVar
from pathlib import Path
from typing import Literal

__all__ = ["Access", "access", "link_or_copy", "listen"]

Access = Literal["read", "write", "table-read", "table-write"]
"""What is done: with a file or directory, or by the engine of a table with those below its directory."""

_listener: ContextVar[Callable[[Access, Path], None] | None] = ContextVar("dstl-local-disk", default=None)


def access(how: Access, path: Path) -> None:
    """Announce an access to the local disk, before it is made.

    Raises:
        OSError: It is to fail.
    """
    listener = _listener.get()
    if listener is not None:
        listener(how, path)


def link_or_copy(source: Path, target: Path) -> None:
    """Make a file appear in another place: by a link, or as a copy where that is another file system.

    Raises:
        OSError: Neither can be done.
    """
    access("write", target)
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def listen(listener: Callable[[Access, Path], None]) -> None:
    """Let a function hear of every access in the current context; an ``OSError`` that it raises is the access's own."""
    _listener.set(listener)
