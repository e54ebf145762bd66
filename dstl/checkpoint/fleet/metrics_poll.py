"""The poll reads the TaskManagers' metrics over connections of its own, whatever they are busy with."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from dstl.checkpoint.fleet.members import Member, Members
from dstl.checkpoint.fleet.own_connections import OwnConnections
from dstl.errors import DstlError
from dstl.metrics import Sample
from dstl.rpc.fleet_messages import ReadMetrics
from dstl.rpc.protocol import Secret

_log = logging.getLogger(__name__)
_ANSWER_S = 2.0  # a page waits for it, and a busy loop answers within a second
_FRESH_S = 0.5  # a page and a scraper that ask together cost one poll


@dataclass(frozen=True, slots=True)
class MemberMetrics:
    """A TaskManager and its metrics.

    Attributes:
        member: Which one.
        sample: The values; the last ones known where it did not answer.
        is_up: Whether it answered this poll.
    """

    member: Member
    sample: Sample
    is_up: bool


class MetricsPoll:
    """Reads the metrics of all TaskManagers when asked, at most twice a second. One event loop.

    One that does not answer within two seconds shows its last values.

    Args:
        secret: The application's.
        members: Who is registered.
        host: The driver's own, where a TaskManager is called by its unix socket.
    """

    def __init__(self, secret: Secret, members: Members, host: str) -> None:
        self._members = members
        self._connections = OwnConnections(secret, host)
        self._last: dict[str, Sample] = {}
        self._turn = asyncio.Lock()
        self._found: list[MemberMetrics] = []
        self._found_at = -_FRESH_S

    async def read(self) -> Sequence[MemberMetrics]:
        """Return every registered TaskManager with its metrics."""
        async with self._turn:
            now = asyncio.get_running_loop().time
            if now() - self._found_at >= _FRESH_S:
                members = dict(self._members.all)
                self._forget(members.keys())
                self._found = list(await asyncio.gather(*map(self._read_one, members.values())))
                self._found_at = now()
            return self._found

    def close(self) -> None:
        """Close the connections. Idempotent."""
        self._connections.keep(())

    def _forget(self, members: AbstractSet[str]) -> None:
        self._connections.keep(members)
        for gone in self._last.keys() - members:
            del self._last[gone]

    async def _read_one(self, member: Member) -> MemberMetrics:
        name, is_up = member.member_id, False
        try:
            async with asyncio.timeout(_ANSWER_S):
                connection = await self._connections.to(name, member.address)
                self._last[name] = (await connection.call(ReadMetrics())).sample
                is_up = True
        except (DstlError, TimeoutError) as error:
            _log.info("TaskManager %s tells no metrics: %s", name, error or "it does not answer")
        return MemberMetrics(member, self._last.get(name, Sample()), is_up)
