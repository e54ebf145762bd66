"""The child process that opens a base's RocksDB files: ``python -m ...file_child DIRECTORY CPU_SECONDS``.

A writer to the store chooses what native code reads here, so it may crash, spin or ask for memory without end:
only this process suffers, within its limits. It imports little, for one is started for each base: 30 ms, of which
RocksDB is most. See :class:`~materializer.bases.file_reader.TableFileReader` for its other half.

Each line of its input is a request: the hexadecimal prefix of a key group's keys, whose entries are wanted, or nothing,
for a check of all that there is. A reply is records of two numbers of four bytes: the lengths of a key and its value,
which follow, or, in a check, how many more keys were read and about how many there are in all. It ends with
:data:`END` and the length of what is wrong with the files, which follows: 0 where nothing is.
"""

from __future__ import annotations

import os
import resource
import signal
import struct
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, BinaryIO

RECORD = struct.Struct("<II")
END = 0xFFFFFFFF  # no record is as long
READY = b"\n"

MEMORY_BYTES = 2 << 30
"""Of address space: the largest entry (64 MiB) some times over, and what RocksDB's threads reserve and never use."""
_OPEN_FILES = 64  # a file that was closed for others is opened again
_WRITTEN_BYTES = 1 << 20
"""Nothing is written but what the engine may log."""
SILENT_S = 60
"""For some megabytes of a local disk, which take milliseconds: a disk that stalls has the rest."""
_CHECKED_KEYS = 1 << 14  # some milliseconds of a walk: progress is told about so often
_SENT_BYTES = 1 << 20  # a pipe's buffer some times over: fewer switches between both processes
_LOOKED_UP = 64
"""Every so many keys one is looked up, for that reads filters and indexes, which a walk does not."""


def serve(rocksdict: Any, path: str, requests: BinaryIO, out: BinaryIO, alarm: Callable[[int], object]) -> None:
    """Answer requests until there are no more.

    Args:
        rocksdict: The module.
        path: Directory of the files.
        requests: Lines, as the module says.
        out: Takes the replies.
        alarm: Ends the process in so many seconds, if it is not told 0 before.
    """
    out.write(READY)
    out.flush()
    database: Any = None
    for line in requests:
        wrong = ""
        try:
            alarm(SILENT_S)
            if database is None:
                database = _open(rocksdict, path)
            prefix = bytes.fromhex(line.decode())
            for piece in _entries(database, prefix) if prefix else _checked(database):
                alarm(0)  # Who reads this may take its time.
                out.write(piece)
                out.flush()
                alarm(SILENT_S)
        except BrokenPipeError:
            return
        except Exception as error:
            wrong = str(error) or type(error).__name__
        alarm(0)
        said = wrong.encode()[:1000]
        out.write(RECORD.pack(END, len(said)) + said)
        out.flush()


def _limit(cpu_seconds: int) -> None:
    for what, most in (
        (resource.RLIMIT_AS, MEMORY_BYTES),
        (resource.RLIMIT_CPU, cpu_seconds),
        (resource.RLIMIT_FSIZE, _WRITTEN_BYTES),
        (resource.RLIMIT_CORE, 0),
    ):
        hard = resource.getrlimit(what)[1]
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(what, (most, most))
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    # Where memory is short all the same, the kernel ends this one first.
    with suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")


def _open(rocksdict: Any, path: str) -> Any:
    blocks = rocksdict.BlockBasedOptions()
    # Read from end to end: a cache would only take memory.
    blocks.set_block_cache(rocksdict.Cache(8 << 20))
    # Without a filter of its own the engine would not read those of the files, as a table does.
    blocks.set_bloom_filter(10, False)
    blocks.set_cache_index_and_filter_blocks(True)
    native = rocksdict.Options(raw_mode=True)
    native.set_block_based_table_factory(blocks)
    # The engine would open all there are, and a base of a large state has more than a process may.
    native.set_max_open_files(_OPEN_FILES)
    how = rocksdict.AccessType.read_only(False)
    return rocksdict.Rdict(path, native, column_families={"default": native}, access_type=how)


def _checked(database: Any) -> Iterator[bytes]:
    expected = min(database.property_int_value("rocksdb.estimate-num-keys") or 0, END - 1)
    # Where a walk has nothing to see, reads may look all the same.
    database.get([key for file in database.live_files() for key in (file["start_key"], file["end_key"])])
    count, last, some = 0, b"", []
    cursor = database.iter()
    cursor.seek_to_first()
    while cursor.valid():
        key = last = _next_key(cursor, last)
        if not count % _LOOKED_UP:
            some.append(key)
        count += 1
        cursor.next()
        if not count % _CHECKED_KEYS:
            _look_up(database, some)
            some.clear()
            yield RECORD.pack(_CHECKED_KEYS, expected)
    cursor.status()
    _look_up(database, some)


def _look_up(database: Any, keys: list[bytes]) -> None:
    if None in database.get(keys):
        raise ValueError("Corruption: a key is not found where it lies")
    database.get([key + b"\1" for key in keys])


def _entries(database: Any, prefix: bytes) -> Iterator[bytes]:
    pending: list[bytes] = []
    size, last = 0, b""
    cursor = database.iter()
    cursor.seek(prefix)
    while cursor.valid():
        key = _next_key(cursor, last)
        if not key.startswith(prefix):
            break
        value = cursor.value()
        pending += (RECORD.pack(len(key), len(value)), key, value)
        last, size = key, size + len(key) + len(value)
        cursor.next()
        if size >= _SENT_BYTES:
            yield b"".join(pending)
            pending, size = [], 0
    cursor.status()
    yield b"".join(pending)


def _next_key(cursor: Any, last: bytes) -> bytes:
    key: bytes = cursor.key()
    if key <= last or key.find(b"\0\0", 4) < 0:
        raise ValueError("Corruption: a key is out of order, or none of a state table")
    return key


if __name__ == "__main__":
    _limit(int(sys.argv[2]))
    import rocksdict  # what is wrong with it, standard error shows

    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    serve(rocksdict, sys.argv[1], sys.stdin.buffer, sys.stdout.buffer, signal.alarm)
