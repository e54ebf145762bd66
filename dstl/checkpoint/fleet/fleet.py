"""The TaskManagers of one application: who is there, which key groups each owns, and calls to all of them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from itertools import count
from typing import Any, TypeVar

from dstl.checkpoint.fleet import members
from dstl.checkpoint.fleet.members import Member, Members
from dstl.checkpoint.fleet.own_connections import OwnConnections
from dstl.checkpoint.fleet.restore_watch import RestoreWatch
from dstl.crash_points import reach
from dstl.errors import DstlError, TaskManagerLost
from dstl.rpc.codec import Call, R
from dstl.rpc.fleet_messages import (
    Abort,
    Complete,
    Persist,
    Persisted,
    ReadUnnamedBases,
    Restore,
    Restored,
    Resume,
    UnnamedBases,
)
from dstl.rpc.messages import Assignment
from dstl.rpc.protocol import Secret
from dstl.store.retry_policy import STALL_S
from handles.checkpoint import CheckpointId, CompletedCheckpoint
from handles.key_group import range_of_partition
from handles.segment_handle import SegmentHandle
from materializer.restore.progress import ProgressListener

_T = TypeVar("_T")

_log = logging.getLogger(__name__)


class FleetChanged(TaskManagerLost):
    """A TaskManager was lost while the fleet was being prepared: nothing is lost with it, so it can be done again."""


class Fleet(Members):
    """Registered TaskManagers. One event loop.

    Args:
        secret: The application's.
        size: How many TaskManagers share the key groups; they are assigned once so many are there.
        max_parallelism: Number of key groups.
        on_lost: Called with a member's id when it is gone.
        host: The driver's own, where a TaskManager is called by its unix socket.
        on_progress: Told how far restores have come, if given.
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
        restore_stall_s: float = STALL_S,
    ) -> None:
        super().__init__(secret, on_lost, host)
        self._on_progress = on_progress
        self._restore_stall_s = restore_stall_s
        self._wanted = self._size = size
        self.max_parallelism = max_parallelism
        self._writer_ids: set[str] = set()
        self._following: asyncio.Task[None] | None = None

    @property
    def wanted(self) -> int:
        """Number of TaskManagers that share the key groups; another number counts from the next :meth:`prepare`."""
        return self._wanted

    @wanted.setter
    def wanted(self, size: int) -> None:
        self._wanted = min(max(1, size), self.max_parallelism)
        self.notify()

    @property
    def is_complete(self) -> bool:
        """True while there are as many TaskManagers as there shall be."""
        return len(self.all) >= self._wanted

    @property
    def has_all_owners(self) -> bool:
        """True while every key group has its TaskManager, so that none is missing but a spare."""
        return len(self._owners()) >= self._size

    def holds(self, parent: CheckpointId | None) -> bool:
        """True while every key group has a TaskManager from which a batch can go on from this checkpoint."""
        return self._wanted == self._size == sum(parent in member.holds for member in self._owners())

    async def writer_ids(self) -> set[str]:
        """Return the writer ids of all TaskManagers of this driver, those that are gone included: a checkpoint that is
        being committed may name their segments.
        """
        return set(self._writer_ids)

    @property
    def assignments(self) -> list[Assignment]:
        """The owners of the key groups, in key group order."""
        owners = [m for m in self.all.values() if m.key_groups is not None]
        return [
            Assignment(m.key_groups, m.address) for m in sorted(owners, key=lambda m: m.key_groups or 0) if m.key_groups
        ]

    def begin_run(self) -> None:
        """Let the next :meth:`prepare` reach every TaskManager: what the run before has left there is dropped."""
        for member in self.all.values():
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
            raise FleetChanged(f"{len(self.all)} of {self._wanted} TaskManagers are there: restart the query")
        body = parent.model_dump_json().encode() if parent else b""
        parent_id = parent.checkpoint_id if parent else None
        self._assign()
        waiting = [m for m in self._owners() if parent_id not in m.holds]
        connections = OwnConnections(self._secret, self._host)
        watch = RestoreWatch(connections, self._on_progress, self._restore_stall_s + members.ANSWER_S)
        try:
            done = await _together(self._prepare_one(m, query_id, parent_id, body, watch) for m in waiting)
        except TaskManagerLost as error:
            raise FleetChanged(*error.args) from error
        if not self.holds(parent_id):
            # One that was left alone, for it held the checkpoint, was lost while others were being restored.
            raise FleetChanged("a TaskManager was lost while others were being restored: restart the query")
        restored = [each for each in done if each is not None]
        loading = {
            member.member_id: member.address
            for member, each in zip(waiting, done, strict=True)
            # One that keeps its tables has not said: it may still be loading them.
            if each is None or (each.status is not None and not each.status.finished)
        }
        if restored:
            self._end_following()  # else it goes on: whatever was being loaded still is
        if restored and loading and self._on_progress is not None:
            self._following = asyncio.ensure_future(watch.follow(loading))
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
        message = Complete(located, checkpoint=checkpoint.checkpoint_id, winners=won, time_ms=time_ms)
        await asyncio.gather(*(self._tell(member, holds, message) for member in self._owners()))

    async def abort(self) -> None:
        """Tell every TaskManager that the checkpoint failed."""
        await asyncio.gather(*(self._tell(member, member.holds, Abort()) for member in self._owners()))

    async def unnamed_bases(self) -> UnnamedBases:
        """Return how many materializations run or wait for a checkpoint to name them, on all TaskManagers together.

        Only while nothing else is asked of them: a TaskManager answers its calls one by one, and counts as lost where
        that takes long.
        """
        parts = await self._all(ReadUnnamedBases())
        longest = max(each.waited_s for each in parts)
        return UnnamedBases(sum(each.running for each in parts), sum(each.waiting for each in parts), longest)

    def close(self) -> None:
        """Close every connection, whereupon the TaskManagers end."""
        self._end_following()
        super().close()

    def _end_following(self) -> None:
        following, self._following = self._following, None
        if following is not None:
            following.cancel()

    def _owners(self) -> list[Member]:
        return [m for m in self.all.values() if m.place is not None]

    def _assign(self) -> None:
        """Give every free place to a TaskManager that has none; where their number has changed, all are free."""
        if self._size != self._wanted:
            self._size = self._wanted
            for member in self.all.values():
                member.place, member.key_groups, member.holds = None, None, ()
        taken = {m.place for m in self._owners()}
        free = (place for place in count() if place not in taken)
        for member in self.all.values():
            if member.place is None and len(self._owners()) < self._size:
                member.place = next(free)
                member.key_groups = range_of_partition(member.place, self.max_parallelism, self._size)

    async def _prepare_one(
        self,
        member: Member,
        query_id: str,
        parent_id: CheckpointId | None,
        body: bytes,
        watch: RestoreWatch,
    ) -> Restored | None:
        """Bring a TaskManager to a checkpoint, and return the figures of its restore if there was one."""
        assert member.key_groups is not None
        resumed = await member.call(Resume(query_id, parent_id, member.key_groups))
        self._writer_ids.add(resumed.writer)
        restored: Restored | None = None
        if not resumed.resumed:
            restore = member.call(Restore(member.key_groups, body), None)
            try:
                restored = await watch.watch(member.member_id, member.address, restore)
            except TimeoutError as error:
                member.lose()
                raise TaskManagerLost(f"{error}: restart the query") from None
            watch.note(member.member_id, restored.status)
        member.holds = (parent_id,)
        return restored

    async def _all(self, message: Call[R], timeout: float = 0.0) -> list[R]:
        owners = self._owners()
        if len(owners) < self._size:
            raise TaskManagerLost(f"{len(owners)} of {self._size} TaskManagers are there: restart the query")
        return await _together(m.call(message, timeout) for m in owners)

    async def _tell(self, member: Member, holds: tuple[CheckpointId | None, ...], message: Call[Any]) -> None:
        """Tell a TaskManager something after which it holds these checkpoints; else the next prepare() asks it."""
        member.holds = ()
        try:
            await member.call(message)
            member.holds = holds
            reach("C6")
        except DstlError as error:
            _log.warning("TaskManager %s did not take %s: %s", member.member_id, message.name, error)


async def _together(calls: Iterable[Coroutine[Any, Any, _T]]) -> list[_T]:
    """Await all of them, also when one fails: none goes on behind the caller's back. Raise the first error."""
    results = await asyncio.gather(*calls, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return [result for result in results if not isinstance(result, BaseException)]
