"""A store that does what another one does, but for what a test's subclass, or its gate, does otherwise."""

import asyncio
from collections.abc import Callable
from typing import Any, cast

from dstl.store.base import ObjectStore


class WrappedStore:
    """Passes every call on that a subclass has not."""

    def __init__(self, inner: ObjectStore) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


class Gate:
    """Wraps stores whose requests of one verb, for some names, wait until it is opened, or fail while it refuses."""

    def __init__(self, verb: str = "put", which: Callable[[str], bool] = lambda name: True) -> None:
        self._verb, self._which = verb, which
        self.waiting: list[str] = []
        self.opened = asyncio.Event()
        self.refusal: Exception | None = None

    def __call__(self, inner: ObjectStore) -> ObjectStore:
        store, request = WrappedStore(inner), getattr(inner, self._verb)

        async def pass_on(name: str, *given: Any, **options: Any) -> Any:
            if self._which(name):
                self.waiting.append(name)
                await self.opened.wait()
                self.waiting.remove(name)
                if self.refusal is not None:
                    raise self.refusal
            return await request(name, *given, **options)

        setattr(store, self._verb, pass_on)
        return cast("ObjectStore", store)


def is_segment(name: str) -> bool:
    return not name.startswith("manifests/")
