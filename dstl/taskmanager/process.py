"""The life of one TaskManager process: enlist, serve, register, and end with the application."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress

from dstl.crash_points import reach
from dstl.errors import CorruptData, DstlError, Invalid, Unavailable
from dstl.metrics import MetricSet
from dstl.rpc.client import Address, AsyncConnection
from dstl.rpc.codec import Call, R
from dstl.rpc.fleet_messages import Enlist, Register
from dstl.rpc.handshake import Role
from dstl.runtime import Runtime, call_in_thread, system_runtime
from dstl.store import open_store
from dstl.store.instrumented import InstrumentedStore
from dstl.store.probe import check_place
from dstl.taskmanager.config import TaskManagerConfig
from dstl.taskmanager.launcher import Invitation
from dstl.taskmanager.memory_limit import read_memory_use
from dstl.taskmanager.task_manager import Components, TaskManager, table_opener
from materializer.scratch_directory import ScratchDirectory, sweep_scratch_directories

__all__ = ["SWITCH_INTERVAL_S", "run"]

_log = logging.getLogger(__name__)
_ANSWER_S = 30.0
_RETRY_S = 0.5
SWITCH_INTERVAL_S = 0.001
"""Seconds for which a thread that encodes or decodes holds the interpreter while the loop wants to answer a task.
Python's own 5 ms, several times per batch, would be the largest part of what a materialization costs a batch."""


async def run(invitation: Invitation, ended: asyncio.Event, recorder: MetricSet | None = None) -> None:
    """Be a TaskManager until the coordinator's connection ends, or ``ended`` is set.

    That connection ends with the application, or when the coordinator has given this TaskManager up. One that is tried
    again (``invitation.retry_s``) is a service of its own: it then enlists anew where the coordinator still answers.
    Another ends, for who has launched it launches the next. ``recorder`` takes its
    metrics, which the coordinator reads.

    Raises:
        Unavailable: No coordinator answers.
        AccessDenied: It is of another application.
        Invalid: It is of another version, or what it says cannot be done here.
    """
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    member = asyncio.ensure_future(_be_member(invitation, system_runtime(), recorder or MetricSet()))
    stopped = asyncio.ensure_future(ended.wait())
    await asyncio.wait({member, stopped}, return_when=asyncio.FIRST_COMPLETED)
    for task in (stopped, member):
        task.cancel()
    await asyncio.gather(stopped, return_exceptions=True)
    with suppress(asyncio.CancelledError):
        await member


async def _be_member(invitation: Invitation, runtime: Runtime, recorder: MetricSet) -> None:
    lifeline = await _coordinator(invitation, runtime)
    while True:
        await _until_let_go(lifeline, invitation, runtime, recorder)
        if not invitation.retry_s:
            break
        try:
            lifeline = await AsyncConnection.open(invitation.coordinator, invitation.secret, role=Role.TASK_MANAGER)
        except DstlError:
            # Nobody listens there any more, or another application.
            break
        _log.warning("TaskManager %s had been given up, and enlists again", invitation.member_id)
    _log.info("the coordinator has ended: so does TaskManager %s", invitation.member_id)


async def _until_let_go(
    lifeline: AsyncConnection, invitation: Invitation, runtime: Runtime, recorder: MetricSet
) -> None:
    """Be a member of the fleet until the coordinator ends the connection; nothing of the state is left then."""
    try:
        member, pid = invitation.member_id, os.getpid()
        told = await _answer(lifeline, Enlist(member, pid))
        try:
            config = TaskManagerConfig.from_json(bytes(told.config))
        except ValueError as error:
            raise CorruptData(f"the coordinator at {invitation.coordinator} tells no configuration: {error}") from None
        try:
            await _check_shared(config, told.marks, invitation.host)
        except Invalid as error:
            # The driver's tasks wait for this TaskManager: they are told, and not only this host's log.
            await _answer(lifeline, Register(member, pid, None, str(error)))
            raise
        async with _serving(config, invitation, runtime, recorder) as own:
            reach("T11")
            await _answer(lifeline, Register(member, pid, own))
            await lifeline.wait_closed_by_peer()
    finally:
        lifeline.close()


async def _coordinator(invitation: Invitation, runtime: Runtime) -> AsyncConnection:
    deadline = runtime.clock.now() + invitation.retry_s
    while True:
        try:
            return await AsyncConnection.open(invitation.coordinator, invitation.secret, role=Role.TASK_MANAGER)
        except Unavailable:
            if runtime.clock.now() >= deadline:
                raise
            await runtime.clock.sleep(_RETRY_S)


async def _check_shared(config: TaskManagerConfig, marks: Sequence[str], host: str) -> None:
    """Refuse to serve where the driver's location is another place than this host's of the same name."""
    store = open_store(config.location, config.s3, config.sealing)
    try:
        await check_place(store, marks, host)
    finally:
        await store.close()


async def _answer(lifeline: AsyncConnection, message: Call[R]) -> R:
    try:
        async with asyncio.timeout(_ANSWER_S):
            return await lifeline.call(message)
    except TimeoutError:
        raise Unavailable(f"the coordinator at {lifeline.address} does not answer {message.name}") from None


@asynccontextmanager
async def _serving(
    config: TaskManagerConfig, invitation: Invitation, runtime: Runtime, recorder: MetricSet
) -> AsyncIterator[Address]:
    """Serve state, and yield where."""
    stores = [
        InstrumentedStore(open_store(config.location, config.s3, config.sealing), recorder=recorder) for _ in range(2)
    ]
    await call_in_thread(sweep_scratch_directories)
    scratch = ScratchDirectory()
    task_manager = TaskManager(
        config,
        Components(
            store=stores[0], hedge_store=stores[1], runtime=runtime, recorder=recorder, memory_use=read_memory_use
        ),
        open_table=table_opener(config.table, scratch.path / "tables"),
        secret=invitation.secret,
    )
    server = task_manager.service.server
    try:
        socket_path = str(scratch.path / "socket")
        await server.listen_unix(socket_path)
        port = await server.listen_tcp(invitation.host) if invitation.listen_tcp else 0
        yield Address(invitation.host, port, socket_path)
    finally:
        await task_manager.close()
        for store in stores:
            await store.close()
        scratch.close()
