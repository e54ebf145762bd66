"""The TaskManagers that have registered, as their coordinator calls them: one that does not answer in time is lost."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from dstl.errors import TaskManagerLost, Unavailable
from dstl.rpc.async_connection import AsyncConnection
from dstl.rpc.client import Address
from dstl.rpc.codec import Call, R
from dstl.rpc.handshake import Role
from dstl.rpc.protocol import Secret
from dstl.rpc.silence import Silence
from handles.checkpoint import CheckpointId
from handles.key_group import KeyGroupRange

_log = logging.getLogger(__name__)
ANSWER_S = 30.0
"""How much longer than it has been given a TaskManager may take to answer; then it counts as lost. A loop that is busy
with a large change set is silent for a second or two; a shorter time would take a slow host for a dead one."""


@dataclass(slots=True, eq=False)
class Member:
    """A registered TaskManager. One event loop.

    Attributes:
        member_id: Its name.
        address: Where it serves.
        connection: What it is called over.
        pid: Its process id, on its own host.
        end_lifeline: Ends the connection on which it has registered, and which tells it that it is a member.
        on_lost: Called once, when it is lost.
        place: Its place among the owners of key groups; None for one that owns none.
        key_groups: The key groups that it owns; None likewise.
        holds: Checkpoints from which a batch can go on with its tables.
    """

    member_id: str
    address: Address
    connection: AsyncConnection
    pid: int
    end_lifeline: Callable[[], None]
    on_lost: Callable[[Member], None]
    place: int | None = None
    key_groups: KeyGroupRange | None = None
    holds: tuple[CheckpointId | None, ...] = ()
    is_lost: bool = field(default=False, init=False)

    async def call(self, message: Call[R], timeout: float | None = 0.0) -> R:
        """Call it.

        Args:
            message: The call.
            timeout: Seconds that it has; after them, and half a minute, it counts as lost. None: the caller watches it.

        Raises:
            TaskManagerLost: It has not answered in time, or is gone.
            DstlError: Whatever it has raised.
        """
        try:
            return await self._answer(message, None if timeout is None else timeout + ANSWER_S)
        except TimeoutError:
            self.lose()
            raise TaskManagerLost(
                f"TaskManager {self.member_id} on {self.address.host} does not answer {message.name}: restart the query"
            ) from None
        except Unavailable as error:
            if not self.connection.is_broken:
                raise
            self.lose()
            raise TaskManagerLost(
                f"TaskManager {self.member_id} on {self.address.host} is gone during {message.name}: {error}"
            ) from error

    async def _answer(self, message: Call[R], seconds: float | None) -> R:
        calling = asyncio.ensure_future(self.connection.call(message))
        try:
            if not await Silence(seconds).wait(calling):
                raise TimeoutError
            return calling.result()
        finally:
            calling.cancel()

    def lose(self) -> None:
        """Give it up, with everything that no record has. Idempotent."""
        if not self.is_lost:
            self.is_lost = True
            self.connection.close()
            # It may live: hung, or cut off. Without this it would keep its state and wait to be called for ever.
            self.end_lifeline()
            self.on_lost(self)


class Members:
    """The registered TaskManagers of one application. One event loop.

    Attributes:
        all: The members by their names, in the order in which they have come. It changes with them.

    Args:
        secret: The application's.
        on_lost: Called with a member's id when it is gone.
        host: The driver's own, where a TaskManager is called by its unix socket.
    """

    def __init__(self, secret: Secret, on_lost: Callable[[str], None], host: str = "") -> None:
        self._secret = secret
        self._on_lost = on_lost
        self._host = host
        self.all: dict[str, Member] = {}
        self._changed = asyncio.Event()

    @property
    def pids(self) -> Sequence[int]:
        """Process ids of the members."""
        return [member.pid for member in self.all.values()]

    @property
    def member_hosts(self) -> Sequence[str]:
        """The members' hosts, in the order of :attr:`pids`."""
        return [member.address.host for member in self.all.values()]

    async def changed(self, timeout: float) -> None:
        """Return at the next :meth:`notify` or registration, or after ``timeout`` seconds."""
        self._changed.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                await self._changed.wait()

    def notify(self) -> None:
        """Wake those who wait for a change."""
        self._changed.set()

    async def register(
        self, member_id: str, address: Address, pid: int, end_lifeline: Callable[[], None]
    ) -> Callable[[], None]:
        """Take a TaskManager in.

        Args:
            member_id: Its name; it takes the place of a member of that name.
            address: Where it serves.
            pid: Its process id, on its own host.
            end_lifeline: Ends the connection on which it has registered, and which tells it that it is a member: called
                when it is given up, so that it frees what it holds, and ends or comes again.

        Returns:
            To be called when it is gone, with everything that no record has. Idempotent.
        """
        connection = await AsyncConnection.open(address.seen_from(self._host), self._secret, role=Role.COORDINATOR)
        if (before := self.all.get(member_id)) is not None:
            before.lose()
        member = Member(member_id, address, connection, pid, end_lifeline, self._forget)
        self.all[member_id] = member
        self.notify()
        _log.info("TaskManager %s has registered: pid %d at %s", member_id, pid, address)
        return member.lose

    def close(self) -> None:
        """Close every connection, whereupon the TaskManagers end."""
        for member in self.all.values():
            member.connection.close()
        self.all.clear()

    def _forget(self, member: Member) -> None:
        if self.all.get(member.member_id) is member:
            del self.all[member.member_id]
            self._on_lost(member.member_id)
            self.notify()
