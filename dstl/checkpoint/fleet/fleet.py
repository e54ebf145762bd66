"""The TaskManagers of one application: who is there, which key groups each owns, and calls to all of them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from typing import Any, TypeVar

from dstl.checkpoint.fleet.restore_watch import RestoreWatch
from dstl.crash_points import reach
from dstl.errors import DstlError, TaskManagerLost, Unavailable
from dstl.rpc.client import Address, AsyncConnection
from dstl.rpc.codec import Call, R
from dstl.rpc.fleet_messages import (
    Abort,
    Complete,
    Persist,
    Persisted,
    Restore,
    Restored,
    Resume,
    Size,
    TableSize,
)
from dstl.rpc.handshake import Role
from dstl.rpc.messages import Assignment
from dstl.rpc.protocol import Secret
from handles.checkpoint import CheckpointId, CompletedCheckpoint
from handles.key_group import KeyGroupRange, range_of_partition
from handles.segment_handle import SegmentHandle
from materializer.restore.progress import ProgressListener

__all__ = ["Fleet", "FleetChanged", "MemberInfo"]

_T = TypeVar("_T")

_log = logging.getLogger(__name__)
_ANSWER_S = 30.0
"""How much longer than it has been given a TaskManager may take to answer; then it counts as lost."""


class FleetChanged(TaskManagerLost):
    """A TaskManager was lost while the fleet was being prepared: nothing is lost with it, so it can be done again."""


@dataclass(frozen=True, slots=True)
class MemberInfo:
    """A registered TaskManager, as others may see it.

    Attributes:
        member_id: Its name.
        address: Where it serves.
        pid: Its process id, on its own host.
        key_groups: The key groups that it owns; None for a spare.
    """

    member_id: str
    address: Address
    pid: int
    key_groups: KeyGroupRange | None


@dataclass(slots=True, eq=False)
class _Member:
    member_id: str
    address: Address
    connection: AsyncConnection
    pid: int
    end_lifeline: Callable[[], None]
    place: int | None = None
    key_groups: KeyGroupRange | None = None
    holds: tuple[CheckpointId | None, ...] = ()


class Fleet:
    """Registered TaskManagers. One event loop.

    Args:
        secret: The application's.
        size: How many TaskManagers share the key groups; they are assigned once so many are there.
        max_parallelism: Number of key groups.
        on_lost: Called with a member's id when it is gone.
        host: The driver's own, where a TaskManager is called by its unix socket.
        on_progress: Told how far restores have come; None: nobody is.
        restore_stall_s: A restore that comes no further for so many seconds, and some more, is given up.
    """

    def __init__(
        self,
        secret: Secret,
        size: int,
        max_parallelism: int,
        on_lost: Callable[[str], None],
        host: str = "",
        on_progress: ProgressListener | None = None,
        restore_stall_s: float = 120.0,
    ) -> None:
        self._on_progress = on_progress
        self._restore_stall_s = restore_stall_s
        self._secret = secret
        self._wanted = self._size = size
        self._max_parallelism = max_parallelism
        self._on_lost = on_lost
        self._host = host
        self._members: dict[str, _Member] = {}
        self._changed = asyncio.Event()
        self._writer_ids: set[str] = set()

    @property
    def wanted(self) -> int:
        """Number of TaskManagers that share the key groups; another number counts from the next :meth:`prepare`."""
        return self._wanted

    @wanted.setter
    def wanted(self, size: int) -> None:
        self._wanted = min(max(1, size), self._max_parallelism)
        self.notify()

    @property
    def is_complete(self) -> bool:
        """True while there are as many TaskManagers as there shall be."""
        return len(self._members) >= self._wanted

    @property
    def has_all_owners(self) -> bool:
        """True while every key group has its TaskManager, so that none is missing but a spare."""
        return len(self._owners()) >= self._size

    @property
    def member_hosts(self) -> Sequence[str]:
        """The members' hosts, in the order of :attr:`pids`."""
        return [member.address.host for member in self._members.values()]

    async def changed(self, timeout: float) -> None:
        """Return at the next :meth:`notify` or registration, or after ``timeout`` seconds."""
        self._changed.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                await self._changed.wait()

    def notify(self) -> None:
        """Wake those who wait for a change."""
        self._changed.set()

    def holds(self, parent: CheckpointId | None) -> bool:
        """True while every key group has a TaskManager from which a batch can go on from this checkpoint."""
        return self._wanted == self._size == sum(parent in member.holds for member in self._owners())

    @property
    def pids(self) -> Sequence[int]:
        """Process ids of the members."""
        return [member.pid for member in self._members.values()]

    async def writer_ids(self) -> set[str]:
        """Return the writer ids of all TaskManagers of this driver, those that are gone included: a checkpoint that is
        being committed may name their segments.
        """
        return set(self._writer_ids)

    @property
    def assignments(self) -> list[Assignment]:
        """The owners of the key groups, in key group order."""
        owners = [m for m in self._members.values() if m.key_groups is not None]
        return [
            Assignment(m.key_groups, m.address) for m in sorted(owners, key=lambda m: m.key_groups or 0) if m.key_groups
        ]

    async def register(
        self, member_id: str, address: Address, pid: int, end_lifeline: Callable[[], None]
    ) -> Callable[[], None]:
        """Take a TaskManager in; it owns nothing until the next :meth:`prepare`.

        Args:
            member_id: Its name; it takes the place of a member of that name.
            address: Where it serves.
            pid: Its process id, on its own host.
            end_lifeline: Ends the connection on which it has registered, and which tells it that it is a member: called
                when it is given up, so that it frees what it holds, and ends or comes again.

        Returns:
            To be called when it is gone, with everything that no checkpoint has. Idempotent.
        """
        connection = await AsyncConnection.open(address.seen_from(self._host), self._secret, role=Role.COORDINATOR)
        if (before := self._members.get(member_id)) is not None:
            self._lose(before)
        member = self._members[member_id] = _Member(member_id, address, connection, pid, end_lifeline)
        self.notify()
        _log.info("TaskManager %s has registered: pid %d at %s", member_id, pid, address)
        return lambda: self._lose(member)

    def begin_run(self) -> None:
        """Let the next :meth:`prepare` reach every TaskManager: what the run before has left there is dropped."""
        for member in self._members.values():
            member.holds = ()

    async def prepare(self, query_id: str, parent: CompletedCheckpoint | None) -> Restored:
        """Bring every TaskManager to a checkpoint: keep tables that are at it already, restore the others.

        One that holds it in this run is left alone: tasks may be at work on it. A new one takes the place of a lost
        one, so that the others keep their key groups.

        Returns:
            The figures of all their restores together, of which the slowest says how long it took.

        Raises:
            FleetChanged: One is missing, or ended meanwhile.
            CorruptData, MissingState: Something that the checkpoint names is damaged or gone.
        """
        if not self.is_complete:
            raise FleetChanged(f"{len(self._members)} of {self._wanted} TaskManagers are there: restart the query")
        body = parent.model_dump_json().encode() if parent else b""
        parent_id = parent.checkpoint_id if parent else None
        self._assign()
        waiting = [m for m in self._owners() if parent_id not in m.holds]
        watch = RestoreWatch(self._secret, self._on_progress, self._restore_stall_s + _ANSWER_S)
        try:
            done = await _together(self._prepare_one(m, query_id, parent_id, body, watch) for m in waiting)
        except TaskManagerLost as error:
            raise FleetChanged(*error.args) from error
        if not self.holds(parent_id):
            # One that was left alone, for it held the checkpoint, was lost while others were being restored.
            raise FleetChanged("a TaskManager was lost while others were being restored: restart the query")
        restored = [each for each in done if each is not None]
        return Restored(
            max((each.seconds for each in restored), default=0.0),
            sum(each.bytes for each in restored),
            sum(each.changes for each in restored),
            None,
        )

    async def persist(self, winners: Mapping[str, Sequence[int]], timeout: float) -> list[Persisted]:
        """Let every TaskManager persist the winners' changes, at the same time.

        Args:
            winners: Per operator, the attempts whose changes count.
            timeout: Seconds that each of them has.

        Returns:
            The parts, one for each TaskManager.

        Raises:
            TaskManagerLost: One is gone.
            DstlError: One of them could not. In any case the caller aborts the checkpoint on all.
        """
        return await self._all(Persist({uid: tuple(ids) for uid, ids in winners.items()}, timeout), timeout)

    async def complete(
        self,
        checkpoint: CompletedCheckpoint,
        winners: Mapping[str, Sequence[int]],
        located: Mapping[str, SegmentHandle],
        time_ms: int | None = None,
    ) -> None:
        """Tell every TaskManager that the checkpoint is durable; one that misses it is restored from it later.

        ``time_ms`` is the batch's processing time: what had expired then may be dropped for good.
        """
        holds = (checkpoint.parent, checkpoint.checkpoint_id)
        won = {uid: tuple(ids) for uid, ids in winners.items()}
        message = Complete(checkpoint.checkpoint_id, won, located, time_ms)
        await asyncio.gather(*(self._tell(member, holds, message) for member in self._owners()))

    async def abort(self) -> None:
        """Tell every TaskManager that the checkpoint failed."""
        await asyncio.gather(*(self._tell(member, member.holds, Abort()) for member in self._owners()))

    @property
    def members(self) -> Sequence[MemberInfo]:
        """The registered TaskManagers."""
        return [MemberInfo(m.member_id, m.address, m.pid, m.key_groups) for m in self._members.values()]

    async def size(self) -> TableSize:
        """Return the size of all tables together."""
        sizes = await self._all(Size())
        return TableSize(sum(each.entries for each in sizes), sum(each.bytes for each in sizes))

    def close(self) -> None:
        """Close every connection, whereupon the TaskManagers end."""
        for member in self._members.values():
            member.connection.close()
        self._members.clear()

    def _lose(self, member: _Member) -> None:
        if self._members.get(member.member_id) is member:
            del self._members[member.member_id]
            member.connection.close()
            # It may live: hung, or cut off. Without this it would keep its state and wait to be called for ever.
            member.end_lifeline()
            self._on_lost(member.member_id)
            self.notify()

    def _owners(self) -> list[_Member]:
        return [m for m in self._members.values() if m.place is not None]

    def _assign(self) -> None:
        """Give every free place to a TaskManager that has none; where their number has changed, all are free."""
        if self._size != self._wanted:
            self._size = self._wanted
            for member in self._members.values():
                member.place, member.key_groups, member.holds = None, None, ()
        taken = {m.place for m in self._owners()}
        free = (place for place in count() if place not in taken)
        for member in self._members.values():
            if member.place is None and len(self._owners()) < self._size:
                member.place = next(free)
                member.key_groups = range_of_partition(member.place, self._max_parallelism, self._size)

    async def _prepare_one(
        self,
        member: _Member,
        query_id: str,
        parent_id: CheckpointId | None,
        body: bytes,
        watch: RestoreWatch,
    ) -> Restored | None:
        """Bring a TaskManager to a checkpoint, and return the figures of its restore if there was one."""
        assert member.key_groups is not None
        resumed = await self._call_within(0.0, member, Resume(query_id, parent_id, member.key_groups))
        self._writer_ids.add(resumed.writer)
        restored: Restored | None = None
        if not resumed.resumed:
            restore = self._call(member, Restore(member.key_groups, body))
            try:
                restored = await watch.watch(member.member_id, member.connection.address, restore)
            except TimeoutError as error:
                self._lose(member)
                raise TaskManagerLost(f"{error}: restart the query") from None
            watch.finished(member.member_id, restored.status)
        member.holds = (parent_id,)
        return restored

    async def _all(self, message: Call[R], timeout: float = 0.0) -> list[R]:
        members = self._owners()
        if len(members) < self._size:
            raise TaskManagerLost(f"{len(members)} of {self._size} TaskManagers are there: restart the query")
        return await _together(self._call_within(timeout, m, message) for m in members)

    async def _tell(self, member: _Member, holds: tuple[CheckpointId | None, ...], message: Call[Any]) -> None:
        """Tell a TaskManager something after which it holds these checkpoints; else the next prepare() asks it."""
        member.holds = ()
        try:
            await self._call_within(0.0, member, message)
            member.holds = holds
            reach("C6")
        except DstlError as error:
            _log.warning("TaskManager %s did not take %s: %s", member.member_id, message.name, error)

    async def _call_within(self, timeout: float, member: _Member, message: Call[R]) -> R:
        """Call a TaskManager, which counts as lost when it has not answered some time after ``timeout`` seconds."""
        try:
            async with asyncio.timeout(timeout + _ANSWER_S):
                return await self._call(member, message)
        except TimeoutError:
            self._lose(member)
            raise TaskManagerLost(
                f"TaskManager {member.member_id} does not answer {message.name}: restart the query"
            ) from None

    async def _call(self, member: _Member, message: Call[R]) -> R:
        try:
            return await member.connection.call(message)
        except Unavailable as error:
            if member.connection.is_broken:
                self._lose(member)
                raise TaskManagerLost(
                    f"TaskManager {member.member_id} is gone during {message.name}: {error}"
                ) from error
            raise


async def _together(calls: Iterable[Coroutine[Any, Any, _T]]) -> list[_T]:
    """Await all of them, also when one fails: none goes on behind the caller's back. Raise the first error."""
    results = await asyncio.gather(*calls, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return [result for result in results if not isinstance(result, BaseException)]
