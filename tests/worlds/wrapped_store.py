"""A store that does what another one does, but for what a test's subclass does otherwise."""

from typing import Any

from dstl.store.base import ObjectStore


class WrappedStore:
    """Passes every call on that a subclass has not."""

    def __init__(self, inner: ObjectStore) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)
