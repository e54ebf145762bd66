"""The place in a path where a checkpoint directory ends and a file of it begins, which a path alone need not tell."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from dstl.checkpoint.manifest.format import MANIFESTS
from dstl.errors import AccessDenied, Invalid, ObjectNotFound
from dstl.files.namespace import METADATA, FilePath, is_of_a_backend, location_of, plain_location_of
from dstl.files.records import FRESH_S
from dstl.runtime import Runtime
from dstl.store.base import ObjectStore
from dstl.store.retry_policy import RetryPolicy
from handles.file_record import MAX_PATH, barrier_batch


class CheckpointRoots:
    """The checkpoint directories of a process. One event loop.

    A user's directories may be called as Spark's own, so ``state/2024/11/job`` may be a checkpoint directory or lie in
    one. A query begins by writing ``metadata`` while it has no run yet, and so tells where its directory is. What
    no query of this process has told is looked up in the store, for calls of no run; a run's calls are about files that
    lie as deep as Spark puts them.

    Args:
        is_root: Looks whether a root has a checkpoint; or says it of each root that was not added.
    """

    def __init__(self, is_root: Callable[[str], Awaitable[bool]] | bool = False) -> None:
        self._is_root = is_root
        self._known: set[str] = set()
        self._runs: dict[str, str] = {}

    def add(self, root: str) -> None:
        """There is a checkpoint directory, or will be."""
        self._known.add(root)

    async def find(self, path: str, run: str) -> FilePath | None:
        """Return where a path is, or would be; None where it is in no checkpoint directory that there is.

        Raises:
            Invalid: It is not of ``dstl://``.
            Unavailable: The store did not answer.
        """
        whole, *inner = FilePath.readings(path)
        if whole.root in self._known:
            return whole
        for each in inner:
            if each.root in self._known or (not run and await self._look(each.root)):
                return self._found(each, inner[0], run)
        if run and inner:
            return self._found(inner[0], inner[0], run)
        return self._found(whole, whole, "") if await self._look(whole.root) else None

    def place(self, path: str, run: str) -> FilePath:
        """Return where a file is to be put.

        Raises:
            ObjectNotFound: It is not a file of a checkpoint directory.
            Invalid: Nobody can tell of which.
        """
        _, *inner = FilePath.readings(path)
        if not inner:
            raise ObjectNotFound(
                f"{path[:MAX_PATH]} is not a file of a checkpoint directory, or has more than {MAX_PATH} characters "
                "there: dstl:// holds checkpoint locations of streaming queries, and nothing else"
            )
        first = inner[0]
        begins = not run and path.endswith(f"/{METADATA}")
        known = None if begins and first.inner == METADATA else next((e for e in inner if e.root in self._known), None)
        chosen = known or first
        is_lost = begins and known is None and first.inner != METADATA
        # Files of a source may be called like barriers; a run whose own barriers they are has none in the directory.
        is_another = chosen is not first and barrier_batch(first.inner) is not None
        if is_lost or (is_another and self._runs.get(run) != chosen.root):
            raise Invalid(
                f"{path.removesuffix('/' + (METADATA if begins else first.inner))} cannot be a checkpoint location: "
                f"{path} may as well be a file of the query of {chosen.root}; give the query another one"
            )
        return self._found(chosen, first, run)

    def _found(self, path: FilePath, first: FilePath, run: str) -> FilePath:
        plain_location_of(path.root)  # what is refused is not remembered
        self.add(path.root)
        if run and path is first:
            self._runs.setdefault(run, path.root)
        return path

    async def _look(self, root: str) -> bool:
        return self._is_root if isinstance(self._is_root, bool) else await self._is_root(root)


class RootProbe:
    """Looks whether a root has a checkpoint: a log, or the plain files of a query. One event loop.

    Args:
        open_store: Opens a location.
        runtime: Clock, jitter.
    """

    def __init__(self, open_store: Callable[[str], ObjectStore], runtime: Runtime) -> None:
        self._open_store = open_store
        self._clock = runtime.clock
        self._retries = RetryPolicy(runtime)
        self._missing: dict[str, float] = {}

    async def __call__(self, root: str) -> bool:
        """Return True where there is a checkpoint, False where there was none a moment ago.

        Raises:
            Unavailable: The store did not answer.
        """
        now = self._clock.now()
        self._missing = {each: seen for each, seen in self._missing.items() if now - seen < FRESH_S}
        if root in self._missing or is_of_a_backend(root):
            return False
        try:
            places = [(location_of(root), MANIFESTS), (plain_location_of(root), METADATA)]
        except Invalid:
            return False
        found = any(await asyncio.gather(*(self._has(root, *place) for place in places)))
        if not found:
            self._missing[root] = now
        return found

    async def _has(self, root: str, location: str, prefix: str) -> bool:
        store = self._open_store(location)
        try:
            return await self._retries.repeat(lambda: _has(store, prefix), f"looking for {root}")
        finally:
            await store.close()


async def _has(store: ObjectStore, prefix: str) -> bool:
    try:
        async for info in store.list(prefix):
            return info.name == prefix or prefix.endswith("/")
    except AccessDenied:
        pass  # nor could a query of this process have its directory there
    return False
