"""Files that a host's JVMs have begun to bring: their parts wait on the local disk, and not in memory."""

from __future__ import annotations

import asyncio
import mmap
import tempfile
from typing import IO

from dstl.errors import Unavailable
from dstl.rpc.codec import Payload


class StagedFiles:
    """Parts of files by tokens. One event loop.

    All tasks of a host may write at once, and a task may keep one file open while it writes others, so that to let
    some of them wait could hold up those that are waited for. They are in files of ``TMPDIR`` that have no names: a
    process that ends in whatever way leaves none.
    """

    def __init__(self) -> None:
        self._files: dict[str, IO[bytes]] = {}

    async def add(self, token: str, content: Payload) -> None:
        """Take the next part of a file.

        Raises:
            Unavailable: The disk does not take it.
        """
        try:
            file = self._files.get(token)
            if file is None:
                file = self._files[token] = tempfile.TemporaryFile()  # noqa: SIM115
            await asyncio.to_thread(file.write, content)
        except OSError as error:
            self.drop(token)
            raise Unavailable(
                f"{tempfile.gettempdir()}, where files wait that tasks are writing, does not take one: "
                f"{error.strerror}; make room there, or give the application another TMPDIR"
            ) from error

    def take(self, token: str) -> Payload:
        """Return the parts of a file as one, which is read from the disk as it is used; nothing where there are none.

        Raises:
            Unavailable: The disk does not take the last of it.
        """
        file = self._files.pop(token, None)
        if file is None:
            return b""
        try:
            with file:
                file.flush()
                return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        except OSError as error:
            raise Unavailable(f"{tempfile.gettempdir()} has lost a file that a task has written: {error}") from error

    def drop(self, token: str) -> None:
        """Forget a file, if it is here."""
        file = self._files.pop(token, None)
        if file is not None:
            file.close()
