"""What is real on a simulated host: its files, which lie in memory, and who reads RocksDB's: threads for processes.

A disk takes 100 ms to open and close a table, for all that RocksDB syncs, and a process 30 ms to start. Neither is what
a world tests.
"""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import rocksdict

from materializer.bases import file_child, file_reader

_MEMORY = Path("/dev/shm")
_JOIN_S = 10.0


def make_directory(name: str) -> Path:
    """Make a directory for a world's files: in memory where the system has files there."""
    return Path(
        tempfile.mkdtemp(prefix=f"dstl-simulated-{name}-", dir=_MEMORY if os.access(_MEMORY, os.W_OK) else None)
    )


@contextmanager
def readers_in_threads() -> Iterator[None]:
    """Let threads read bases of RocksDB files, by the code of the child processes that do so elsewhere."""
    readers: list[_Reader] = []

    def start(command: list[str], **_: Any) -> _Reader:
        readers.append(_Reader(command[-2]))
        return readers[-1]

    module: Any = file_reader
    before, module.Popen = module.Popen, start
    try:
        yield
    finally:
        module.Popen = before
        for reader in readers:
            reader.kill()
            reader.wait()


class _Reader:
    """What :class:`~materializer.bases.file_reader.TableFileReader` uses of a process."""

    def __init__(self, path: str) -> None:
        requests, to_requests = os.pipe()
        from_replies, replies = os.pipe()
        self.stdin, self.stdout = os.fdopen(to_requests, "wb", 0), os.fdopen(from_replies, "rb")
        self.returncode = 0
        self._thread = threading.Thread(target=_serve, args=(path, requests, replies), daemon=True)
        self._thread.start()

    def kill(self) -> None:
        """Let it find nobody at either pipe. Idempotent."""
        self.stdin.close()
        self.stdout.close()

    def wait(self) -> None:
        self._thread.join(_JOIN_S)
        if self._thread.is_alive():
            raise RuntimeError("a reader of a base in a simulated world does not end when both its pipes are closed")


def _serve(path: str, requests: int, replies: int) -> None:
    with suppress(BrokenPipeError), open(replies, "wb") as out, open(requests, "rb") as lines:
        file_child.serve(rocksdict, path, lines, out, lambda _: None)
