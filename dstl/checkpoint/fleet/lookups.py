"""Lookups: one key's state of a running query, read from the TaskManager that has it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dstl.checkpoint.coordinator import CheckpointCoordinator
from dstl.checkpoint.fleet.members import Member, Members
from dstl.checkpoint.fleet.own_connections import OwnConnections
from dstl.checkpoint.spark_commit import SparkExecution
from dstl.checkpoint.state_catalogue import Registry, StateCatalogue
from dstl.errors import Unavailable
from dstl.rpc.fleet_messages import Content, LookUp
from dstl.runtime import Clock
from handles.key_group import KeyGroup

_ANSWER_S = 5.0  # a TaskManager that takes a large change set is silent for a second or two
_ATTEMPTS = 20  # a second in all, many times what a notification takes
_PAUSE_S = 0.05  # a TaskManager hears of a checkpoint within milliseconds


@dataclass(frozen=True, slots=True)
class Lookups:
    """Reads single keys as of the last committed batch. One event loop.

    Invariants:
        1. A value is of a checkpoint that is durable. Changes of a batch that runs, or is being committed, are no part
           of it.

    Attributes:
        connections: To the TaskManagers, its own.
        fleet: The TaskManagers.
        catalogue: The operators and their states.
        current: Returns the coordinator of the run that is open, if there is one.
        execution: Spark's; None: a run that is open is running.
        clock: For repeated attempts.
    """

    connections: OwnConnections
    fleet: Members
    catalogue: StateCatalogue
    current: Callable[[], CheckpointCoordinator | None]
    execution: SparkExecution | None
    clock: Clock

    async def registry(self, operator: str) -> Registry:
        """Return the states of an operator of the running query.

        Raises:
            Unavailable: The query is not running, or no batch of this run has begun.
        """
        coordinator = self._running()
        run_id = coordinator.run_id
        if self.execution is not None and (run_id is None or not await self.execution.is_running(run_id)):
            raise _not_running()
        registry: Registry = json.loads(self.catalogue.registry_of(operator))
        return registry

    async def read(
        self, operator: str, state: int, key_group: KeyGroup, key: bytes, user_keys: tuple[bytes, ...] = ()
    ) -> Content:
        """Return one key's entries, of the last committed batch.

        Args:
            operator: The operator.
            state: The state's number.
            key_group: The key's.
            key: The key.
            user_keys: Of the entries that are wanted; empty for all.

        Raises:
            Unavailable: The run is over, or the TaskManager of this key is gone, restores, or does not answer.
            Invalid: The key has more than one reply holds.
        """
        try:
            async with asyncio.timeout(_ANSWER_S):
                return await self._found(key_group, operator, state, key_group, key, user_keys)
        except TimeoutError:
            raise Unavailable(
                f"the TaskManager of key group {key_group} does not answer: look up again later"
            ) from None

    async def _found(self, key_group: KeyGroup, *wanted: Any) -> Content:
        for attempt in range(1, _ATTEMPTS + 1):
            checkpoint = self._running().committed
            if checkpoint is None:
                return Content((), ())
            try:
                owner = self._owner(key_group)
                connection = await self.connections.to(owner.member_id, owner.address)
                return await connection.call(LookUp(checkpoint.checkpoint_id, *wanted))
            except Unavailable:
                if attempt == _ATTEMPTS:
                    raise
            await self.clock.sleep(_PAUSE_S)
        raise AssertionError("unreachable")

    def close(self) -> None:
        """Close the connections. Idempotent."""
        self.connections.keep(())

    def _owner(self, key_group: KeyGroup) -> Member:
        members = self.fleet.all
        self.connections.keep(members.keys())
        owner = next((m for m in members.values() if m.key_groups is not None and key_group in m.key_groups), None)
        if owner is None:
            raise Unavailable(f"no TaskManager has key group {key_group} now: look up again when the query goes on")
        return owner

    def _running(self) -> CheckpointCoordinator:
        coordinator = self.current()
        if coordinator is None:
            raise _not_running()
        return coordinator


def _not_running() -> Unavailable:
    return Unavailable(
        "the query is not running, or no batch of it has begun since it was started: look up again after its first "
        "batch; read_state and dstl state read its last checkpoint meanwhile"
    )
