"""Reads bases that are RocksDB files by way of a child process, for they are native code's input from elsewhere."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from subprocess import PIPE, Popen

import pyarrow as pa

from dstl.changelog.change_set import MAX_CHANGE_BYTES
from dstl.errors import CorruptData, Unavailable
from handles.key_group import KeyGroup
from materializer.bases.file_child import END, MEMORY_BYTES, READY, RECORD, SILENT_S
from materializer.tables.rocksdb_engine import encode_prefix, import_rocksdict, unavailable
from materializer.tables.rocksdb_snapshot import entry_pages

_COMMAND = [sys.executable, "-P", "-m", "materializer.bases.file_child"]
_CPU_S = 60  # for what no size explains, such as loading the library
_CPU_S_PER_MB = 1.0
"""A check takes 3 ms of processor per MB, and slower hosts and small entries some times that."""
_MAX_KEY_BYTES = 2 * MAX_CHANGE_BYTES
"""A stored key may have each byte twice."""


class TableFileReader:
    """Reads the files of one base. One thread at a time.

    The child has this user's rights and none of this process's environment. It is started when something is first
    asked for. Once it has died, of whatever, the base is not readable any more.

    Args:
        path: Directory of all files of the base.
        name: The base's object, for messages.
    """

    def __init__(self, path: Path, name: str) -> None:
        self._path = path
        self._name = name
        self._process: Popen[bytes] | None = None

    def check(self) -> Iterator[float]:
        """Read every key, and yield now and then which share of them was read since.

        Raises:
            CorruptData: The files are damaged, or the child has died of them.
            Unavailable: The disk cannot be read, or no process can be started.
            Invalid: The extra is not installed.
        """
        for count, expected, _ in self._ask(b""):
            yield count / max(count, expected)

    def entries(self, key_group: KeyGroup) -> Iterator[pa.RecordBatch]:
        """Yield one key group's entries as pages, ordered by state, key, user key.

        Raises:
            CorruptData, Unavailable, Invalid: As for :meth:`check`.
        """
        prefix = encode_prefix(key_group)[:2]
        return entry_pages((pair[:size], pair[size:]) for size, _, pair in self._ask(prefix))

    def close(self) -> None:
        """End the child. Idempotent."""
        process = self._process
        if process is not None:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                assert pipe is not None
                pipe.close()

    def _ask(self, prefix: bytes) -> Iterator[tuple[int, int, bytes]]:
        process = self._started()
        assert process.stdin is not None
        try:
            os.write(process.stdin.fileno(), prefix.hex().encode() + b"\n")
        except (OSError, ValueError):
            raise self._death() from None
        ended = False
        try:
            while True:
                first, second = RECORD.unpack(self._read(RECORD.size))
                if first == END:
                    break
                if first > _MAX_KEY_BYTES or (second > MAX_CHANGE_BYTES and prefix):
                    raise self._death()
                yield first, second, self._read(first + second) if prefix else b""
            wrong = self._read(second).decode(errors="replace")
            ended = True
        finally:
            if not ended:
                self.close()
        if wrong.startswith("IO error") and "No such file" not in wrong:
            raise unavailable(self._path, wrong)
        if wrong:
            raise CorruptData(f"the files of base {self._name} are damaged ({wrong}): restore from an older base")

    def _read(self, size: int) -> bytes:
        assert self._process is not None
        assert self._process.stdout is not None
        data = self._process.stdout.read(size)
        if len(data) < size:
            raise self._death()
        return data

    def _death(self) -> CorruptData:
        self.close()
        code = self._process.returncode if self._process is not None else 0
        how = signal.Signals(-code).name if code < 0 else f"code {code}"
        return CorruptData(
            f"the files of base {self._name} have ended the process that reads them ({how}; it has "
            f"{MEMORY_BYTES >> 30} GiB and {SILENT_S} s without a word): they are damaged, or made to do harm. Restore "
            "from an older base, and find out who can write to the store"
        )

    def _started(self) -> Popen[bytes]:
        if self._process is None:
            import_rocksdict()
            megabytes = sum(file.stat().st_size for file in self._path.iterdir()) / 1e6
            environment = {"PYTHONPATH": os.pathsep.join(os.path.abspath(path) for path in sys.path if path)}
            if "LD_LIBRARY_PATH" in os.environ:  # without which some a Python does not start
                environment["LD_LIBRARY_PATH"] = os.environ["LD_LIBRARY_PATH"]
            try:
                self._process = Popen(
                    [*_COMMAND, str(self._path), str(_CPU_S + int(_CPU_S_PER_MB * megabytes))],
                    stdin=PIPE,
                    stdout=PIPE,
                    cwd="/",
                    env=environment,
                )
            except OSError as error:
                raise Unavailable(f"no process can be started to read base files: {error.strerror}") from error
            assert self._process.stdout is not None
            if self._process.stdout.read(1) != READY:
                self.close()
                raise Unavailable("the process that reads base files ended at once: standard error says why")
        return self._process
