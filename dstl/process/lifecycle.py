"""The life of a process: a TaskManager's, from its first word to its coordinator on, or a coordinator's of files."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, closing, suppress
from typing import TYPE_CHECKING

from dstl.crash_points import reach
from dstl.errors import CorruptData, DstlError, Invalid, Unavailable
from dstl.files.config import FileConfig
from dstl.jvm.build import check_version
from dstl.metrics import MetricSet
from dstl.process.launch_spec import LaunchSpec, answer_line
from dstl.rpc.async_connection import AsyncConnection
from dstl.rpc.client import Address
from dstl.rpc.codec import Call, R
from dstl.rpc.fleet_messages import Enlist, Register
from dstl.rpc.handshake import Role
from dstl.rpc.server import RpcServer
from dstl.runtime import Runtime, call_in_thread, closed_after, end_tasks, system_runtime, to_its_end
from dstl.store import open_store
from dstl.store.instrumented import InstrumentedStore
from dstl.store.probe import check_place
from dstl.system_limits import keep_freed_memory, raise_open_file_limit
from dstl.taskmanager.memory_limit import read_memory_use
from dstl.taskmanager.task_manager import Components, TaskManager, table_opener
from materializer.local_disk import ScratchDirectory, sweep_scratch_directories

if TYPE_CHECKING:
    from dstl.files.process import OpenStore

_log = logging.getLogger(__name__)
_ANSWER_S = 30.0
"""A coordinator that is silent for longer hangs: its loop is never busy for seconds."""
_RETRY_S = 0.5
"""Between attempts to reach a coordinator that is not there yet: both may have been started at once."""
_HAND_OVER_S = 25.0
"""Kubernetes kills half a minute after it has asked."""
SWITCH_INTERVAL_S = 0.001
"""Seconds for which a thread that encodes or decodes holds the interpreter while the loop wants to answer a task.
Python's own 5 ms, several times per batch, would be the largest part of what a materialization costs a batch."""


def tune_process() -> None:
    """Let this process serve: to be called when all is imported, before it begins."""
    raise_open_file_limit()
    keep_freed_memory()
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    # What was imported stays. The collector takes 20 ms to walk it, and would again and again between tasks.
    gc.freeze()
    gc.enable()


class ProcessLife:
    """The life of a process that a launch spec describes, from its start to its end. One event loop.

    Args:
        spec: What to be.
        recorder: Takes the metrics, which the coordinator reads; None: not reported.
        open_store: Opens a location; for benchmarks and tests, which slow it down or make it fail.
        runtime: Clock, jitter and ids.
        say: Takes the line that says where the process serves.
    """

    def __init__(
        self,
        spec: LaunchSpec,
        recorder: MetricSet | None = None,
        open_store: OpenStore = open_store,
        runtime: Runtime | None = None,
        say: Callable[[bytes], None] = lambda line: None,
    ) -> None:
        self._spec = spec
        self._recorder = recorder or MetricSet()
        self._open_store = open_store
        self._runtime = runtime or system_runtime()
        self._say = say

    async def run(self, ended: asyncio.Event) -> None:
        """Live until ``ended`` is set, or, as a TaskManager, until the coordinator's connection ends.

        That ends with the application, or when the coordinator has given this TaskManager up. One that is tried again
        (``spec.retry_s``) is a service of its own: it then enlists anew where the coordinator still answers. Another
        ends, for who has launched it launches the next.

        Args:
            ended: The process is to end, and hands over what it has; where this is cancelled instead, it does not.

        Raises:
            Unavailable: No coordinator answers.
            AccessDenied: It is of another application.
            Invalid: It is of another version, as the jar may be, or what it says cannot be done here.
        """
        check_version(self._spec.version)
        where = self._spec.coordinator
        life = asyncio.ensure_future(self._coordinate() if where is None else self._be_member(where, ended))
        stopped = asyncio.ensure_future(ended.wait())
        try:
            await asyncio.wait({life, stopped}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await end_tasks((stopped, life))
        if not life.cancelled():
            life.result()

    async def _coordinate(self) -> None:
        """Coordinate the files of an application, and serve the driver's host."""
        from dstl.files.process import FileCoordinator  # in this process alone

        config = FileConfig.of(self._spec.options, os.environ)
        async with AsyncExitStack() as stack:
            scratch = stack.enter_context(closing(ScratchDirectory()))
            coordinator = FileCoordinator(self._spec.host, self._spec.secret, config, self._runtime, self._open_store)
            stack.push_async_callback(coordinator.close)
            coordinator.address = await self._listen(coordinator.service.server, scratch)
            self._say(answer_line(coordinator.address.path))
            await asyncio.Event().wait()

    async def _be_member(self, coordinator: Address, ended: asyncio.Event) -> None:
        lifeline = await self._reach(coordinator)
        while True:
            await self._until_let_go(lifeline, ended)
            if not self._spec.retry_s:
                break
            try:
                lifeline = await self._connect(coordinator)
            except DstlError:
                # Nothing listens there any more, or another application.
                break
            _log.warning("TaskManager %s had been given up, and enlists again", self._spec.member_id)
        _log.info("the coordinator has ended: so does TaskManager %s", self._spec.member_id)

    async def _until_let_go(self, lifeline: AsyncConnection, ended: asyncio.Event) -> None:
        """Be a member of the fleet until the coordinator ends the connection; nothing of the state is left then."""
        try:
            member, pid = self._spec.member_id, os.getpid()
            told = await _answer(lifeline, Enlist(member, pid))
            try:
                config = FileConfig.from_json(bytes(told.config))
            except ValueError as error:
                raise CorruptData(f"the coordinator at {lifeline.address} tells no configuration: {error}") from None
            try:
                await self._check_shared(config, told.marks)
            except Invalid as error:
                # The driver's tasks wait for this TaskManager: they are told, and not only this host's log.
                await _answer(lifeline, Register(member, pid, None, str(error)))
                raise
            async with self._serving(config, lifeline) as (own, hand_over):
                reach("T11")
                await _answer(lifeline, Register(member, pid, own))
                self._say(answer_line(own.path))
                try:
                    await lifeline.wait_closed_by_peer()
                except asyncio.CancelledError:
                    if ended.is_set():
                        with suppress(TimeoutError):
                            async with asyncio.timeout(_HAND_OVER_S):
                                await hand_over()
                    raise
        finally:
            lifeline.close()

    async def _reach(self, coordinator: Address) -> AsyncConnection:
        deadline = self._runtime.clock.now() + self._spec.retry_s
        while True:
            try:
                return await self._connect(coordinator)
            except Unavailable:
                if self._runtime.clock.now() >= deadline:
                    raise
                await self._runtime.clock.sleep(_RETRY_S)

    async def _connect(self, coordinator: Address) -> AsyncConnection:
        return await AsyncConnection.open(coordinator, self._spec.secret, role=Role.TASK_MANAGER)

    async def _check_shared(self, config: FileConfig, marks: Sequence[str]) -> None:
        """Refuse to serve where the driver's location is another place than this host's of the same name."""
        if config.location:
            store = self._open_store(config.location, config.s3, config.sealing)
            async with closed_after(store):
                await check_place(store, marks, self._spec.host)

    @asynccontextmanager
    async def _serving(
        self, config: FileConfig, lifeline: AsyncConnection
    ) -> AsyncIterator[tuple[Address, Callable[[], Awaitable[None]]]]:
        """Serve tables of key groups, or files of this host, and yield where, and what hands them over at the end."""
        await call_in_thread(sweep_scratch_directories)
        stack = AsyncExitStack()
        try:
            scratch = stack.enter_context(closing(ScratchDirectory()))
            if config.location:
                server, hand_over = self._open_tables(config, scratch, stack), _hand_nothing_over
            else:
                from dstl.files.process import FileHost  # a third of the imports, of no use to tables

                spec, calls = self._spec, await self._connect(lifeline.address)
                # They break where the coordinator was silent. It may go on, and is to know that this host does not.
                broken = asyncio.ensure_future(calls.wait_closed())
                broken.add_done_callback(lambda _: lifeline.close())
                stack.callback(broken.cancel)
                host = FileHost(spec.member_id, spec.secret, config, self._runtime, self._open_store, calls)
                stack.push_async_callback(host.close)
                server, hand_over = host.service.server, host.hand_over
            yield await self._listen(server, scratch), hand_over
        finally:
            # The process may be told to end while its coordinator's end closes it.
            await to_its_end(stack.aclose())

    def _open_tables(self, config: FileConfig, scratch: ScratchDirectory, stack: AsyncExitStack) -> RpcServer:
        stores = [
            InstrumentedStore(self._open_store(config.location, config.s3, config.sealing), recorder=self._recorder)
            for _ in range(2)
        ]
        for store in stores:
            stack.push_async_callback(store.close)
        components = Components(
            store=stores[0],
            hedge_store=stores[1],
            runtime=self._runtime,
            recorder=self._recorder,
            memory_use=read_memory_use,
        )
        opener = table_opener(config.table, scratch.path / "tables", config.rocksdb)
        task_manager = TaskManager(config, components, open_table=opener, secret=self._spec.secret)
        stack.push_async_callback(task_manager.close)
        return task_manager.service.server

    async def _listen(self, server: RpcServer, scratch: ScratchDirectory) -> Address:
        """Listen on a unix socket for this host, and on a port for others, and return where.

        Raises:
            Invalid: As :meth:`RpcServer.listen_tcp`.
        """
        host, bind, socket = self._spec.host, self._spec.bind, str(scratch.path / "socket")
        await server.listen_unix(socket)
        port = await server.listen_tcp(bind, known_as=host) if bind else 0
        return Address(host, port, socket)


async def _hand_nothing_over() -> None:
    """Leave what no checkpoint holds of tables: the next run makes it again."""


async def _answer(lifeline: AsyncConnection, message: Call[R]) -> R:
    try:
        async with asyncio.timeout(_ANSWER_S):
            return await lifeline.call(message)
    except TimeoutError:
        raise Unavailable(f"the coordinator at {lifeline.address} does not answer {message.name}") from None
