"""How far the TaskManagers' restores have come, as one figure: asked of them while they restore."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any, TypeVar

from dstl.errors import DstlError
from dstl.taskmanager.client import Address, AsyncConnection
from dstl.taskmanager.protocol import Secret
from materializer.progress import ProgressListener, RestoreStatus, combined, status_from_wire

__all__ = ["RestoreWatch"]

_T = TypeVar("_T")
_log = logging.getLogger(__name__)
_INTERVAL_S = 0.5


class RestoreWatch:
    """Watches the restores of one preparation of the fleet, and tells of all of them together.

    A TaskManager answers one call after the other on a connection, so it is asked on another one; that is opened only
    once its restore has taken a while. What goes wrong with it ends the telling, never the restore. One event loop.

    Args:
        secret: The application's.
        tell: Told of the sum of all, about twice a second, and once more at the end.
    """

    def __init__(self, secret: Secret, tell: ProgressListener) -> None:
        self._secret = secret
        self._tell = tell
        self._latest: dict[str, RestoreStatus] = {}

    async def watched(self, member_id: str, address: Address, restore: Coroutine[Any, Any, _T]) -> _T:
        """Await a TaskManager's restore, and ask meanwhile how far it has come."""
        ended = asyncio.Event()
        asking = asyncio.ensure_future(self._ask(member_id, address, ended))
        try:
            return await restore
        finally:
            ended.set()
            asking.cancel()
            with suppress(asyncio.CancelledError):
                await asking

    def finished(self, member_id: str, fields: dict[str, Any]) -> None:
        """Take a restore's end: the fields of its answer."""
        status = status_from_wire(fields.get("progress"))
        if status is not None:
            self._latest[member_id] = status
            self._tell_all()

    async def _ask(self, member_id: str, address: Address, ended: asyncio.Event) -> None:
        connection = None
        try:
            while not ended.is_set():
                with suppress(TimeoutError):
                    async with asyncio.timeout(_INTERVAL_S):
                        await ended.wait()
                if connection is None:
                    connection = await AsyncConnection.open(address, self._secret)
                fields, _ = await connection.call("restore_progress")
                status = status_from_wire(fields.get("progress"))
                if status is not None:
                    self._latest[member_id] = status
                    self._tell_all()
        except DstlError as error:
            _log.debug("how far TaskManager %s has come is not known: %s", member_id, error)
        finally:
            if connection is not None:
                connection.close()

    def _tell_all(self) -> None:
        try:
            self._tell(combined(self._latest.values()))
        except Exception:
            _log.exception("a listener of a restore's progress raised")
