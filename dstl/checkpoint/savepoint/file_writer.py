"""Base files of a savepoint that is being made: key groups packed one behind the other, stored while others come."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from dataclasses import dataclass, field

import google_crc32c

from dstl.checkpoint.savepoint.format import SavepointFile
from dstl.checkpoint.savepoint.objects import SavepointObjects
from dstl.errors import DstlError
from handles.key_group import KeyGroup, KeyGroupRange
from materializer.bases.key_group_file import KeyGroupFile, encode_key_group
from materializer.tables import Expired, HeapStateTable, StateTable

__all__ = ["SavepointFileWriter"]

_log = logging.getLogger(__name__)

_UPLOADS = 3


@dataclass(slots=True)
class _OpenFile:
    data: bytearray = field(default_factory=bytearray)
    parts: list[tuple[int, int, int, int]] = field(default_factory=list)


class SavepointFileWriter:
    """Packs key groups into base files, one open file per operator, and stores them while the next are encoded."""

    def __init__(self, objects: SavepointObjects, directory: str, file_bytes: int) -> None:
        self._objects = objects
        self._directory = directory
        self._file_bytes = file_bytes
        self._open: dict[str, _OpenFile] = {}
        self._stored: dict[str, list[SavepointFile]] = {}
        self._uploads: set[asyncio.Task[None]] = set()
        self._names: list[str] = []

    async def write(self, operator: str, table: StateTable | None, key_groups: KeyGroupRange, dropped: Expired) -> None:
        """Add one operator's key groups, without what is dropped; closes the table."""
        table = table if table is not None else HeapStateTable()
        snapshot = table.snapshot()
        try:
            for group in key_groups:
                # zstd and the checksum let the loop go on meanwhile.
                part: KeyGroupFile = await asyncio.to_thread(encode_key_group, snapshot, group, expired=dropped)
                await self.add(operator, group, part.data, part.rows)
        finally:
            snapshot.close()
            table.close()

    async def add(self, operator: str, key_group: KeyGroup, data: bytes, rows: int) -> None:
        """Add a key group that is encoded already, of an operator whose key groups come in ascending order."""
        file = self._open.setdefault(operator, _OpenFile())
        file.parts.append((key_group, len(file.data), len(data), rows))
        file.data += data
        if len(file.data) >= self._file_bytes:
            await self._store(operator)

    async def finish(self, operators: Iterable[str]) -> list[SavepointFile]:
        """Store what is open, wait for all, and return the files by operator in the given order."""
        uids = list(operators)
        for operator in uids:
            if operator in self._open:
                await self._store(operator)
        await self._wait(0)
        return [file for operator in uids for file in self._stored.get(operator, ())]

    async def withdraw(self) -> None:
        """Delete what was stored for a savepoint that did not come to be; the descriptor certainly is not there."""
        for task in self._uploads:
            task.cancel()
        await asyncio.gather(*self._uploads, return_exceptions=True)
        try:
            await self._objects.delete(self._names)
        except DstlError as error:
            _log.warning("%d files below %s are left: %s", len(self._names), self._directory, error)

    async def _store(self, operator: str) -> None:
        file = self._open.pop(operator)
        name = f"{self._directory}/{len(self._names):06d}.base"
        data = bytes(file.data)
        relative = "/".join(name.split("/")[2:])
        self._stored.setdefault(operator, []).append(
            SavepointFile(
                operator=operator,
                name=relative,
                size=len(data),
                checksum=google_crc32c.value(data),
                parts=tuple(file.parts),
            )
        )
        self._names.append(name)
        await self._wait(_UPLOADS - 1)
        self._uploads.add(asyncio.ensure_future(self._objects.put(name, data)))

    async def _wait(self, most: int) -> None:
        """Wait until at most so many uploads are under way; raises what one of them raised."""
        while len(self._uploads) > most:
            done, self._uploads = await asyncio.wait(self._uploads, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
