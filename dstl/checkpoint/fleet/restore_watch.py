"""The watch tells how far the TaskManagers' restores have come, as one figure: asked of them while they restore."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Mapping
from typing import Any, TypeVar

from dstl.checkpoint.fleet.own_connections import OwnConnections
from dstl.errors import DstlError
from dstl.rpc.client import Address
from dstl.rpc.fleet_messages import ReadRestoreStatus
from dstl.rpc.silence import Silence
from dstl.runtime import end_tasks
from materializer.restore.progress import ProgressListener, RestoreStatus, combine

_T = TypeVar("_T")
_log = logging.getLogger(__name__)
_INTERVAL_S = 0.5  # a progress bar moves at that pace, and each answer is a small message
_ANSWER_S = 10.0
"""How long a TaskManager may take to say how far it is; then it is asked again, on another connection."""


class RestoreWatch:
    """Watches the restores of one preparation of the fleet: ends those that stand still, tells of all of them together.

    A TaskManager that can serve goes on loading behind its batches: :meth:`follow` goes on telling.

    It is asked once its restore has taken a while. One event loop.

    Args:
        connections: Those that the TaskManagers are asked over.
        tell: Told of the sum of all, about twice a second, and once more at the end, if given.
        stall_s: How many seconds a restore may stand still; it takes as long as it likes while bytes are applied.
    """

    def __init__(self, connections: OwnConnections, tell: ProgressListener | None, stall_s: float) -> None:
        self._connections = connections
        self._tell = tell
        self._stall_s = stall_s
        self._latest: dict[str, RestoreStatus] = {}
        self._moves: dict[str, int] = {}

    async def watch(self, member_id: str, address: Address, restore: Coroutine[Any, Any, _T]) -> _T:
        """Await a TaskManager's restore, and ask meanwhile how far it has come.

        Raises:
            TimeoutError: It stood still for too long; ``restore`` is cancelled. Says which TaskManager.
            DstlError: Whatever the restore raises.
        """
        self._moves[member_id] = 0
        silence = Silence(self._stall_s, lambda: self._moves[member_id])
        restoring = asyncio.ensure_future(restore)
        asking = asyncio.ensure_future(self._ask(member_id, address, restoring))
        try:
            if not await silence.wait(restoring):
                raise TimeoutError(f"the restore of TaskManager {member_id} stands still for {self._stall_s:g} s")
            return await restoring
        finally:
            await end_tasks((asking, restoring))

    async def follow(self, loading: Mapping[str, Address]) -> None:
        """Go on asking TaskManagers that serve before all is loaded, until they have loaded it or are gone.

        Args:
            loading: Addresses by member id. One that had loaded everything before this run is not reported.
        """
        await asyncio.gather(*(self._follow(member_id, address) for member_id, address in loading.items()))

    def note(self, member_id: str, status: RestoreStatus | None) -> None:
        """Take how far a restore has come, or its end; None where that is not known."""
        before = self._latest.get(member_id)
        if status is None:
            return
        self._latest[member_id] = status
        if before is None or (status.done, status.total, status.finished) != (
            before.done,
            before.total,
            before.finished,
        ):
            self._moves[member_id] = self._moves.get(member_id, 0) + 1
        if self._tell is None:
            return
        try:
            self._tell(combine(self._latest.values()))
        except Exception:
            _log.exception("a listener of a restore's progress raised")

    async def _follow(self, member_id: str, address: Address) -> None:
        never = asyncio.get_running_loop().create_future()
        try:
            while True:
                status = await self._status(member_id, address)
                if status is None or (status.finished and member_id not in self._latest):
                    return
                self.note(member_id, status)
                if status.finished:
                    return
                await asyncio.wait([never], timeout=_INTERVAL_S)
        except (DstlError, TimeoutError) as error:
            _log.debug("how far TaskManager %s has come is not known any more: %s", member_id, error)
        finally:
            self._connections.drop(member_id)

    async def _ask(self, member_id: str, address: Address, restoring: asyncio.Future[Any]) -> None:
        try:
            while not (await asyncio.wait([restoring], timeout=_INTERVAL_S))[0]:
                try:
                    self.note(member_id, await self._status(member_id, address))
                except (DstlError, TimeoutError) as error:
                    _log.debug("how far TaskManager %s has come is not known: %s", member_id, error)
        finally:
            self._connections.drop(member_id)

    async def _status(self, member_id: str, address: Address) -> RestoreStatus | None:
        async with asyncio.timeout(_ANSWER_S):
            connection = await self._connections.to(member_id, address)
            return (await connection.call(ReadRestoreStatus())).status
