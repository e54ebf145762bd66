"""The probe of a location before a query starts: whether its store keeps the contract."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import stat
from collections.abc import Awaitable, Sequence
from typing import TypeVar

from dstl.errors import (
    AccessDenied,
    CorruptData,
    DstlError,
    Invalid,
    ObjectExists,
    ObjectNotFound,
    OutcomeUnknown,
    Unavailable,
)
from dstl.runtime import Runtime, call_in_thread, system_runtime
from dstl.store.base import ObjectStore
from dstl.store.location import local_directories
from dstl.store.retry_policy import RetryPolicy
from dstl.store.sharded import shard_names

_log = logging.getLogger(__name__)
_MARKING_S = 10.0  # a TaskManager's start waits for it
_T = TypeVar("_T")


async def probe(store: ObjectStore, *, runtime: Runtime | None = None, timeout_s: float = 30.0) -> None:
    """Write, list, read and delete one unique object, so that a query is refused before it starts.

    It also puts the object a second time: a store that lets a conditional put overwrite would let two drivers commit
    the same checkpoint. Five requests, each of which is made again where the store does not answer, for some seconds.
    A directory that others may change is warned of.
    The object is ``probe/<id>``; a probe that dies leaves it to the cleaner.

    Args:
        store: Any store; stays open.
        runtime: Where the object's name comes from.
        timeout_s: Longest wait for all of it, in seconds.

    Raises:
        AccessDenied: The credentials or the role do not allow one of the four; the message says which.
        Invalid: No such bucket, or the store ignores conditional puts.
        Unavailable: The store does not answer, or not in time.
    """
    runtime = runtime or system_runtime()
    try:
        async with asyncio.timeout(timeout_s):
            # A driver that starts while its store has a bad moment is no driver with a wrong configuration.
            await _exercise(store, runtime, RetryPolicy(runtime))
            await call_in_thread(_warn_of_others, store.location)
    except TimeoutError as error:
        raise Unavailable(
            f"{store.location} did not answer within {timeout_s:g} s; check the network and the endpoint"
        ) from error
    except (AccessDenied, Unavailable) as error:
        raise type(error)(f"cannot use {store.location}: {error}") from error
    except (Invalid, CorruptData, ObjectNotFound) as error:
        raise Invalid(f"cannot use {store.location}: {error}") from error


def _warn_of_others(location: str) -> None:
    """Runs in a thread."""
    try:
        paths = local_directories(location)
    except Invalid:
        return  # a store made in a program, as in tests, may have a location that cannot be parsed
    for path in paths:
        with contextlib.suppress(OSError):
            info = os.stat(path)
            if info.st_uid not in (os.geteuid(), 0) or info.st_mode & stat.S_IWOTH:
                _log.warning(
                    "%s is of user %d, mode %03o: other users can change the state there. Use a directory of this "
                    "user's own, mode 700, or seal what it holds (sealing.key_file)",
                    path,
                    info.st_uid,
                    stat.S_IMODE(info.st_mode),
                )


async def _exercise(store: ObjectStore, runtime: Runtime, retries: RetryPolicy) -> None:
    """Make each request until it is answered: a store that fails every third would hardly ever pass all in a row."""
    what = f"probing {store.location}"
    names: list[str] = []

    async def put() -> None:
        # Under a name of its own each time: one whose answer was lost may be there.
        names.append(f"probe/{runtime.new_id()}")
        await _known(store.put(names[-1], names[-1].encode(), if_absent=True))

    async def put_again() -> bool:
        try:
            await _known(store.put(names[-1], b"twice", if_absent=True))
        except ObjectExists:
            return True
        return False

    async def listed() -> list[str]:
        return [info.name async for info in store.list(names[-1])]

    try:
        await retries.repeat(put, what)
        if not await retries.repeat(put_again, what):
            raise Invalid("the store ignores conditional puts (If-None-Match), so two drivers could both commit")
        if await retries.repeat(lambda: store.get(names[-1]), what) != names[-1].encode():
            raise CorruptData(f"{names[-1]} reads back with other bytes than were written")
        if await retries.repeat(listed, what) != names[-1:]:
            raise Invalid(f"{names[-1]} was written and is not listed")
    except DstlError:
        # The first error is the one to report; what cannot be deleted stays for the cleaner.
        with contextlib.suppress(DstlError):
            await store.delete(names)
        raise
    await retries.repeat(lambda: _known(store.delete(names)), what)


async def _known(request: Awaitable[_T]) -> _T:
    """Take an answer that was lost for none: what this module asks for may be asked twice."""
    try:
        return await request
    except OutcomeUnknown as error:
        raise Unavailable(f"{error}; try again") from error


async def mark_place(store: ObjectStore, runtime: Runtime) -> tuple[str, ...]:
    """Leave an object in each of a store's locations, for another process to find with :func:`check_place`.

    The caller deletes the names when the other side has answered; the cleaner deletes what stays.

    Returns:
        Their names; none where the store does not take them now: a fault is no proof of anything.

    Raises:
        AccessDenied: The credentials do not allow it.
    """
    unique = runtime.new_id()
    names = tuple("probe/" + unique if shard == "s0" else f"{shard}/probe/{unique}" for shard in shard_names(store))
    try:
        async with asyncio.timeout(_MARKING_S):
            for name in names:
                await store.put(name, name.encode(), if_absent=True)
    except (TimeoutError, Unavailable, OutcomeUnknown) as error:
        _log.warning("%s cannot be marked for a TaskManager to find: %s", store.location, error)
        return ()
    return names


async def check_place(store: ObjectStore, names: Sequence[str], host: str) -> None:
    """Find what the driver has left, so that a directory that is only called the same is refused before a batch.

    Args:
        store: What this process takes for the driver's location.
        names: Of :func:`mark_place`.
        host: This host, for the message.

    Raises:
        Invalid: It is another place; names host and location.
        AccessDenied: The credentials do not allow reading there.
    """
    for name in names:
        try:
            # That it is there is the proof, for nobody else has the name: an answer that was cut short is none against.
            await store.get(name)
        except ObjectNotFound:
            raise Invalid(
                f"{store.location} on host {host} is not what the driver has there ({name} is not in it): state would "
                "be lost with that host. Use a directory that driver and all hosts share, mounted at the same path, "
                "or s3://bucket/prefix"
            ) from None
        except (Unavailable, OutcomeUnknown) as error:
            _log.warning("whether %s is the driver's place is not known: %s", store.location, error)
            return
