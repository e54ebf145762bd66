"""The module ``os`` of a machine that loses its power: what was not synced may be gone afterwards.

A file's bytes are safe once it was synced, a name in a directory once that directory was, as POSIX has it. What is not
safe is undone at the cut, each operation by a draw of its own: a disk writes down what it likes, in any order.
"""

import os
import random
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

COUNTED = ("open", "write", "fsync", "link", "replace", "mkdir", "unlink")


class PowerCut(OSError):
    """The machine is off."""


@dataclass
class _Entry:
    """A change of a directory that is not safe."""

    directory: str
    undo: Callable[[], None]


class Machine:
    """Stands in for ``os`` in the local store; :meth:`restart` is what the next start finds.

    Args:
        nth: The call at which the power goes.
        seed: Decides what is lost.
        lying: Directories are never safe, whatever is synced: a store that relied on it must be found out.
    """

    def __init__(self, nth: int, seed: int, *, lying: bool = False) -> None:
        self.calls = 0
        self.is_off = False
        self.lost = 0
        self._nth = nth
        self._lying = lying
        self._rng = random.Random(seed)
        self._lock = threading.RLock()
        self._entries: list[_Entry] = []
        self._unsynced: dict[int, int] = {}
        """By inode, how many of its bytes are safe."""
        self._names: dict[int, set[str]] = {}

    def __getattr__(self, name: str) -> Any:
        real = getattr(os, name)
        if name not in COUNTED:
            return real

        def call(*arguments: Any, **named: Any) -> Any:
            with self._lock:
                self.calls += 1
                self.is_off = self.is_off or self.calls >= self._nth
                if self.is_off and name != "open":
                    raise PowerCut("the power is off")
                before = getattr(self, f"_before_{name}", None)
                undo = before(*arguments, **named) if before is not None else None
                result = real(*arguments, **named)
                if undo is not None:
                    self._entries.append(undo)
                return result

        return call

    def restart(self) -> None:
        """Lose what is not safe."""
        for entry in reversed(self._entries):
            if self._rng.random() < 0.6:
                self.lost += 1
                entry.undo()
        for inode, safe in self._unsynced.items():
            for path in self._names.get(inode, ()):
                if os.path.exists(path) and os.stat(path).st_ino == inode:
                    self.lost += 1
                    os.truncate(path, self._rng.randint(safe, os.stat(path).st_size))

    # -- what each call leaves unsafe

    def _before_write(self, descriptor: int, data: Any) -> None:
        found = os.fstat(descriptor)
        self._unsynced.setdefault(found.st_ino, found.st_size)
        self._names.setdefault(found.st_ino, set()).add(_path(descriptor))

    def _before_fsync(self, descriptor: int) -> None:
        path = _path(descriptor)
        self._unsynced.pop(os.fstat(descriptor).st_ino, None)
        if not self._lying:
            self._entries = [entry for entry in self._entries if entry.directory != path]

    def _before_mkdir(self, name: str, mode: int = 0o777, *, dir_fd: int | None = None) -> _Entry | None:
        path = _join(dir_fd, name)
        if os.path.exists(path):
            return None

        def undo() -> None:
            # A directory that is lost takes with it what is in it.
            for root, folders, files in os.walk(path, topdown=False):
                for each in files:
                    os.unlink(os.path.join(root, each))
                for each in folders:
                    os.rmdir(os.path.join(root, each))
            if os.path.isdir(path):
                os.rmdir(path)

        return _Entry(os.path.dirname(path), undo)

    def _before_link(
        self, source: str, name: str, *, src_dir_fd: int, dst_dir_fd: int, follow_symlinks: bool
    ) -> _Entry | None:
        path = _join(dst_dir_fd, name)
        if os.path.exists(path):
            return None
        self._names.setdefault(os.stat(source, dir_fd=src_dir_fd).st_ino, set()).add(path)
        return _Entry(os.path.dirname(path), lambda: Path(path).unlink(missing_ok=True))

    def _before_replace(self, source: str, name: str, *, src_dir_fd: int, dst_dir_fd: int) -> _Entry:
        path = _join(dst_dir_fd, name)
        before = Path(path).read_bytes() if os.path.isfile(path) else None
        self._names.setdefault(os.stat(source, dir_fd=src_dir_fd).st_ino, set()).add(path)

        def undo() -> None:
            Path(path).unlink(missing_ok=True)
            if before is not None and os.path.isdir(os.path.dirname(path)):
                Path(path).write_bytes(before)

        return _Entry(os.path.dirname(path), undo)

    def _before_unlink(self, name: str, *, dir_fd: int | None = None) -> _Entry | None:
        path = _join(dir_fd, name)
        if not os.path.isfile(path):
            return None
        before = Path(path).read_bytes()

        def undo() -> None:
            if os.path.isdir(os.path.dirname(path)) and not os.path.exists(path):
                Path(path).write_bytes(before)

        return _Entry(os.path.dirname(path), undo)


def _path(descriptor: int) -> str:
    return os.readlink(f"/proc/self/fd/{descriptor}")


def _join(descriptor: int | None, name: str) -> str:
    return os.path.join(_path(descriptor), name) if descriptor is not None else os.path.abspath(name)
