"""The local disk of a process: its scratch directories, and accesses that a simulation can let fail.

What a TaskManager does to its cache of bases, the files that it has fetched and the tables in files is announced here:
a simulation lets it fail as a full disk does, or a broken one. Outside of a simulation there is no listener. The file
system that is a *store* is another thing (``dstl.store.local``).
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Callable
from contextlib import suppress
from contextvars import ContextVar
from pathlib import Path
from typing import Literal

from dstl.errors import Unavailable

Access = Literal["read", "write", "table-read", "table-write"]
"""What is done: with a file or directory, or by the engine of a table with those below its directory."""

_listener: ContextVar[Callable[[Access, Path], None] | None] = ContextVar("dstl-local-disk", default=None)

_log = logging.getLogger(__name__)
_LOCK = ".dstl-lock"
_NAME = re.compile(r"dstl-(base-)?[a-z0-9_]{8}")
_ATTEMPTS = 10  # each is lost only to a sweep at that very moment


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


class ScratchDirectory:
    """A new directory in TMPDIR, for its owner alone (0700). Not thread-safe.

    A file in it is locked while this process lives, however it ends: by that the others know whose is still used.

    Attributes:
        path: Where it is.

    Args:
        prefix: Begins its name: ``dstl-`` or ``dstl-base-``.

    Raises:
        Unavailable: It cannot be made.
    """

    def __init__(self, prefix: str = "dstl-") -> None:
        place, why = tempfile.gettempdir(), "it cannot be locked"
        for _ in range(_ATTEMPTS):
            try:
                self.path = Path(tempfile.mkdtemp(prefix=prefix))
            except OSError as error:
                why = str(error.strerror)
                break
            held = _try_lock(self.path / _LOCK, os.O_RDWR | os.O_CREAT)
            if held is not None:
                self._lock = held
                return
            # It was swept before it was locked.
        raise Unavailable(f"cannot make a directory in {place}: {why}; make room there, or set another TMPDIR")

    def close(self) -> None:
        """Remove it with all that is in it. Idempotent."""
        shutil.rmtree(self.path, ignore_errors=True)
        lock, self._lock = self._lock, -1
        if lock >= 0:
            os.close(lock)


def sweep_scratch_directories() -> list[Path]:
    """Remove from TMPDIR what this user's processes that have been killed left there; returns the directories.

    Only a directory with our name and our lock file is touched, and none that anybody has locked.
    """
    removed = []
    with suppress(OSError):
        for path in sorted(Path(tempfile.gettempdir()).iterdir()):
            if _NAME.fullmatch(path.name) and _remove_if_left(path):
                removed.append(path)
    return removed


def _remove_if_left(path: Path) -> bool:
    try:
        about = path.lstat()
    except OSError:
        return False
    if not stat.S_ISDIR(about.st_mode) or about.st_uid != os.geteuid():
        return False
    lock = _try_lock(path / _LOCK, os.O_RDWR)
    if lock is None:
        return False
    try:
        shutil.rmtree(path, ignore_errors=True)
    finally:
        os.close(lock)
    _log.info("%s was left by a process that has been killed, and is removed", path)
    return True


def _try_lock(path: Path, flags: int) -> int | None:
    """Return a descriptor of a file that this process has locked; None where another has it, or it is not there."""
    try:
        descriptor = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(descriptor).st_nlink:
            return descriptor
    except OSError:
        pass
    os.close(descriptor)
    return None
