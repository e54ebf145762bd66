"""The parts of a commit: what this process and other hosts have of a checkpoint directory, gathered for one record."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Protocol

from dstl.errors import DstlError, TaskManagerLost
from dstl.files.file_log import ALL_LANES, FileLog, joined
from dstl.files.file_run import FileRun
from dstl.rpc.file_messages import PersistedFiles
from handles.segment_handle import SegmentHandle
from handles.sequence_number import SequenceNumber

__all__ = ["FileHost", "Participants"]

_log = logging.getLogger(__name__)


class FileHost(Protocol):
    """A host that takes files of a directory."""

    async def persist(self, root: str, run: str, version: int) -> PersistedFiles:
        """Make what it has durable, or hand it over."""
        ...

    async def complete(self, root: str, located: Mapping[str, SegmentHandle]) -> None:
        """The record is durable."""
        ...

    async def reset(self, root: str) -> None:
        """The record was certainly not written."""
        ...


class Participants:
    """Those who have files for the next commit of a directory. One event loop.

    Invariants:
        1. Whoever is asked in :meth:`persist` is told what became of the record: :meth:`complete` or :meth:`reset`.
        2. What a host has put behind its answer is a later commit's.

    Args:
        root: The directory's URI.
        log: What this process itself takes.
        hosts: The other hosts' services by name; the caller keeps it up to date.
        run: Who has taken files.
    """

    def __init__(self, root: str, log: FileLog, hosts: Mapping[str, FileHost], run: FileRun) -> None:
        self._root = root
        self._log = log
        self._hosts = hosts
        self._run = run
        self._asked: dict[str, FileHost] = {}
        self._holders: frozenset[tuple[str, str]] = frozenset()
        self._taken: frozenset[str] = frozenset()
        self._of = ""
        self._stored: dict[str, int] = {}

    def begin(self, barrier: str, run: str) -> None:
        """Take note of who takes part in a commit; a host that takes a file from now on takes part in the next one.

        Raises:
            TaskManagerLost: One is gone, and what it held is lost.
        """
        self._of, self._holders = run, self._run.take_hosts(barrier)
        self._taken = frozenset(member for member, _ in self._holders)
        self._stored = {member: self._run.count_stored(member) for member in self._taken}
        gone = sorted(each for each in self._taken - self._hosts.keys() if not self._run.outlives(each))
        if gone:
            raise TaskManagerLost(f"the file service {gone[0]} is gone with files of {barrier}: restart the query")
        self._asked = {each: self._hosts[each] for each in self._taken if each in self._hosts}

    @property
    def has_hosts(self) -> bool:
        """True where other hosts take part."""
        return bool(self._taken)

    async def persist(self, version: int) -> list[PersistedFiles]:
        """Have all of them make what they have durable, or hand it over.

        Args:
            version: Of the state to which the commit leads.

        Raises:
            TaskManagerLost: A host is gone, and what it held is lost. All others were told.
            DstlError: The store did not take it, likewise.
        """
        asked = [self._ask(member, host, version) for member, host in self._asked.items()]
        # Before anything is awaited this process has said what is its own part.
        parts = await asyncio.gather(self._log.persist(self._of, ALL_LANES, version), *asked, return_exceptions=True)
        failed = [each for each in parts if isinstance(each, BaseException)]
        if failed:
            await self.reset()
            raise failed[0]
        told = [each for each in parts if isinstance(each, PersistedFiles)]
        self._run.keep_hosts((m, self._of) for m, part in zip(self._asked, told[1:], strict=True) if part.has_more)
        for member in self._taken - self._asked.keys():
            told += self._run.stored_by(member)
        return told

    async def complete(
        self, located: Mapping[str, SegmentHandle], barrier: str
    ) -> list[tuple[str, SequenceNumber, bytes]]:
        """The record is durable; returns the small files that this process has of it, as :meth:`FileLog.complete`."""
        small = self._log.complete(located)
        self._run.forget_stored(self._stored)
        for host in self._asked.values():
            try:
                await host.complete(self._root, located)
            except DstlError as error:
                # It is gone, and the record is there: what it held is in the store.
                _log.warning("%s: a host has gone after %s: %s", self._root, barrier, error)
        self._forget()
        return small

    async def reset(self) -> None:
        """The record was certainly not written: all keep what they have for the next one."""
        self._log.reset()
        self._run.keep_hosts(self._holders)
        await asyncio.gather(*(host.reset(self._root) for host in self._asked.values()), return_exceptions=True)
        self._forget()

    def abandon(self) -> None:
        """Nobody knows whether the record was written: the run is over; what is of no run waits for the next record."""
        self._log.abandon()
        # They are not told: whoever is asked again knows that nobody will answer for the last time.
        self._run.keep_hosts(self._holders)
        self._forget()

    async def _ask(self, member: str, host: FileHost, version: int) -> PersistedFiles:
        try:
            return await host.persist(self._root, self._of, version)
        except TaskManagerLost:
            if not self._run.outlives(member):
                raise
            return joined(self._run.stored_by(member))

    def _forget(self) -> None:
        self._asked, self._holders, self._taken, self._stored = {}, frozenset(), frozenset(), {}
