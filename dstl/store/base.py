"""The contract of object stores, and the grammar of names."""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Protocol

from dstl.errors import Invalid

_NAME = re.compile(r"[A-Za-z0-9_=\-]+(?:\.[A-Za-z0-9_=\-]+)*(?:/[A-Za-z0-9_=\-]+(?:\.[A-Za-z0-9_=\-]+)*)*")


def check_name(name: str) -> str:
    """Return the name if it is a relative object name of our grammar.

    Path elements of ``A-Z a-z 0-9 _ - =`` with inner dots, joined by single slashes, at most 512 characters: so
    ``..``, a leading slash, ``%``, NUL and anything that is not ASCII cannot occur.

    Raises:
        Invalid: The name breaks the grammar.
    """
    if len(name) > 512 or _NAME.fullmatch(name) is None:
        raise Invalid(
            f"not an object name: {name[:80]!r}; its elements are letters, digits, '-', '_', '=' and inner dots"
        )
    return name


@dataclass(frozen=True, slots=True)
class ByteRange:
    """Bytes ``[start, stop)`` of an object: half-open."""

    start: int
    stop: int

    def __post_init__(self) -> None:
        if not 0 <= self.start < self.stop:
            raise Invalid(f"not a byte range: [{self.start}, {self.stop})")


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """The facts that a store gives of an object.

    Attributes:
        name: Relative to the store's location.
        size: In bytes.
        modified: When it was created, in Unix seconds, by the *store's* clock.
    """

    name: str
    size: int
    modified: float


class ObjectStore(Protocol):
    """Immutable objects by name under one location.

    Invariants:
        1. A name is written once by us; ``if_absent`` makes the store enforce it, and never is emulated by a check
           before the write.
        2. An object is visible whole or not at all, and durable when ``put`` returns.
        3. A call raises :class:`~dstl.errors.Unavailable` when the write certainly did not happen,
           :class:`~dstl.errors.OutcomeUnknown` when it may have; reads raise ``Unavailable`` only.
        4. No method retries: the caller's policy owns attempts.
        5. A cancelled ``put`` may still create its object later, so its bytes must never change.
        6. Deleting is idempotent: a lost answer to it is ``Unavailable``, and it may be done again.
        7. After ``close`` every call raises :class:`~dstl.errors.Closed`.

    A name that is the directory of another (``a`` and ``a/b``) is not portable: never make both.

    All methods belong to one event loop; ``put`` and ``get`` may run concurrently.
    """

    @property
    def location(self) -> str:
        """The location as the user wrote it, without any secret: for messages."""

    async def put(self, name: str, data: bytes | memoryview, *, if_absent: bool = False) -> ObjectInfo:
        """Store an object.

        Raises:
            ObjectExists: ``if_absent`` and the name is taken.
            SlowDown: The store throttles; certainly not stored.
            Unavailable: Certainly not stored.
            OutcomeUnknown: May be stored.
            AccessDenied: Credentials or role refuse it.
            Invalid: The name or the location is wrong (no such bucket).
        """

    async def get(self, name: str, byte_range: ByteRange | None = None) -> bytes:
        """Return an object's bytes, or a range of them.

        A range that reaches beyond the end returns what is there; the caller checks the length.

        Raises:
            ObjectNotFound: No such object.
            Unavailable: Try again.
        """

    async def head(self, name: str) -> ObjectInfo:
        """Return size and age of an object.

        Raises:
            ObjectNotFound: No such object.
        """

    def list(self, prefix: str = "") -> AsyncGenerator[ObjectInfo, None]:
        """Yield objects whose name starts with ``prefix``; it may be left early, and closed then.

        Those of one folder come in the order of their names, whatever comes between them: SeaweedFS lists folder by
        folder, S3 by the whole name.
        """

    async def delete(self, names: Sequence[str]) -> None:
        """Delete objects; a name that is already gone is a success. As few requests as the store allows."""

    async def close(self) -> None:
        """Release connections. Idempotent."""
