"""The parts of a commit: what this process and other hosts have of a checkpoint directory, gathered for one record."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping

from dstl.checkpoint.fleet.members import Member
from dstl.errors import DstlError, TaskManagerLost
from dstl.files.file_log import ALL_LANES, FileLog
from dstl.files.file_run import FileRun
from dstl.rpc.fleet_messages import Abort, Complete, DirectoryCommit, Persist, Persisted
from handles.segment_handle import SegmentHandle

_log = logging.getLogger(__name__)


class Participants:
    """Those who have files for the next commit of a directory. One event loop.

    Invariants:
        1. Whoever is asked in :meth:`persist` is told what became of the record: :meth:`complete` or :meth:`reset`.
        2. What a host has put behind its answer is a later commit's.

    Args:
        root: The directory's URI.
        log: What this process itself takes.
        run: Who has taken files.
        hosts: The other hosts' services by name; the caller keeps it up to date.
        timeout_s: Seconds that each of them has to make its files durable.

    Attributes:
        root: The same.
        log: The same.
        run: The same.
    """

    def __init__(
        self, root: str, log: FileLog, run: FileRun, hosts: Mapping[str, Member] | None = None, timeout_s: float = 0.0
    ) -> None:
        self.root = root
        self.log = log
        self.run = run
        self._hosts = {} if hosts is None else hosts
        self._timeout_s = timeout_s
        self._asked: dict[str, Member] = {}
        self._holders: frozenset[tuple[str, str]] = frozenset()
        self._taken: frozenset[str] = frozenset()
        self._of = ""
        self._stored: dict[str, int] = {}

    def begin(self, barrier: str, run: str) -> None:
        """Take note of who takes part in a commit; a host that takes a file from now on takes part in the next one.

        Raises:
            TaskManagerLost: One is gone, and what it held is lost.
        """
        self._of, self._holders = run, self.run.take_hosts(barrier)
        self._taken = frozenset(member for member, _ in self._holders)
        self._stored = {member: self.run.count_stored(member) for member in self._taken}
        gone = sorted(each for each in self._taken - self._hosts.keys() if not self.run.outlives(each))
        if gone:
            self.run.keep_hosts(each for each in self._holders if each[0] not in gone)
            self._forget()
            raise TaskManagerLost(f"the file service {gone[0]} is gone with files of {barrier}: restart the query")
        # In one order, whatever the hash of a name: a simulated world goes the same way each time.
        self._asked = {each: self._hosts[each] for each in sorted(self._taken) if each in self._hosts}

    @property
    def has_hosts(self) -> bool:
        """True where other hosts take part."""
        return bool(self._taken)

    async def persist(self, version: int) -> list[Persisted]:
        """Have all of them make what they have durable, or hand it over.

        Args:
            version: Of the state to which the commit leads.

        Raises:
            TaskManagerLost: A host is gone, and what it held is lost. All others were told.
            DstlError: The store did not take it, likewise.
        """
        asked = [self._ask(member, host, version) for member, host in self._asked.items()]
        # Before anything is awaited this process has said what is its own part.
        parts = await asyncio.gather(self._persist_own(version), *asked, return_exceptions=True)
        failed = [each for each in parts if isinstance(each, BaseException)]
        if failed:
            await self.reset()
            raise failed[0]
        told = [each for each in parts if not isinstance(each, BaseException)]
        for member, parts_of_host in zip(self._asked, told[1:], strict=True):
            if any(part.has_more for part in parts_of_host):
                self.run.keep_hosts([(member, self._of)])
        stored = [self.run.stored_by(member) for member in sorted(self._taken - self._asked.keys())]
        return [part for each in (*told, *stored) for part in each]

    async def complete(self, located: Mapping[str, SegmentHandle], barrier: str) -> None:
        """The record is durable."""
        self.log.complete(located)
        self.run.forget_stored(self._stored)
        told = (host.call(Complete(located, self.root)) for host in self._asked.values())
        for error in await asyncio.gather(*told, return_exceptions=True):
            if isinstance(error, DstlError):
                # It is gone, and the record is there: what it held is in the store.
                _log.warning("%s: a host has gone after %s: %s", self.root, barrier, error)
        self._forget()

    async def reset(self) -> None:
        """The record was certainly not written: all keep what they have for the next one."""
        self.log.reset()
        self.run.keep_hosts(self._holders)
        await asyncio.gather(*(host.call(Abort(self.root)) for host in self._asked.values()), return_exceptions=True)
        self._forget()

    def abandon(self) -> None:
        """Nobody knows whether the record was written: the run is over; what is of no run waits for the next record."""
        self.log.abandon()
        # They are not told: whoever is asked again knows that nobody will answer for the last time.
        self.run.keep_hosts(self._holders)
        self._forget()

    async def _persist_own(self, version: int) -> list[Persisted]:
        return [await self.log.persist(self._of, ALL_LANES, version)]

    async def _ask(self, member: str, host: Member, version: int) -> list[Persisted]:
        commit = DirectoryCommit(self.root, self._of, version)
        try:
            return [await host.call(Persist({}, self._timeout_s, commit), self._timeout_s)]
        except TaskManagerLost:
            if not self.run.outlives(member):
                raise
            return self.run.stored_by(member)

    def _forget(self) -> None:
        self._asked, self._holders, self._taken, self._stored = {}, frozenset(), frozenset(), {}
