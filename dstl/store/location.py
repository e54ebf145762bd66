"""From the location that a user writes to the store behind it."""

from __future__ import annotations

import re
from urllib.parse import unquote

from dstl.errors import Invalid
from dstl.options import S3Options
from dstl.store.base import ObjectStore, check_name
from dstl.store.local import LocalStore
from dstl.store.memory import MemoryStore
from dstl.store.prefixed import PrefixedStore
from dstl.store.s3 import S3Store
from dstl.store.sharded import ShardedStore

__all__ = ["open_store"]

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.\-]*)://(.*)", re.DOTALL)
_BETWEEN_LOCATIONS = re.compile(r",(?=(?:s3a?|file|memory)://)")
_BUCKET = re.compile(r"[a-z0-9][a-z0-9.\-]{1,61}[a-z0-9]")


def open_store(location: str, options: S3Options | None = None) -> ObjectStore:
    """Return the store at a location. Nothing is contacted or made yet: :func:`~dstl.store.probe.probe` does that.

    ============================  ======================================================================
    ``s3://bucket/prefix``        S3, credentials from the provider chain of the SDK (``s3a://`` as well)
    ``/path``, ``file:///path``   a directory; a relative path and ``~`` are taken from now
    ``memory://name/prefix``      this process's memory, shared by name
    several, joined by commas     one store over all of them, see :class:`~dstl.store.sharded.ShardedStore`
    ============================  ======================================================================

    Args:
        location: As above. It never holds credentials.
        options: For S3; ignored elsewhere.

    Raises:
        Invalid: Not a location.
    """
    locations = _BETWEEN_LOCATIONS.split(location)
    stores = [_open_one(one, options or S3Options()) for one in locations]
    return stores[0] if len(stores) == 1 else ShardedStore(stores)


def _open_one(location: str, options: S3Options) -> ObjectStore:
    found = _SCHEME.fullmatch(location)
    if found is None:
        if not location or "\0" in location:
            raise Invalid("a location is a directory, s3://bucket/prefix or memory://name; none was given")
        return LocalStore(location)
    scheme, rest = found[1].lower(), found[2]
    if "@" in rest and scheme != "file":
        # Not shown: what stands before the sign may be a secret.
        raise Invalid(f"a {scheme}:// location holds no user, key or secret: use the SDK's provider chain")
    if scheme == "file":
        if not rest.startswith("/"):
            raise Invalid(f"not a location: {location!r}; write file:///absolute/path")
        return LocalStore(unquote(rest))
    name, _, prefix = rest.partition("/")
    prefix = prefix.rstrip("/")
    if prefix:
        check_name(prefix)
    if scheme == "memory":
        memory = MemoryStore(check_name(name))
        return PrefixedStore(memory, prefix) if prefix else memory
    if scheme in ("s3", "s3a"):
        if _BUCKET.fullmatch(name) is None:
            raise Invalid(f"not a bucket name: {name!r}; write s3://bucket/prefix")
        return S3Store(name, prefix, options)
    raise Invalid(f"no store for {scheme}:// ; use a directory, s3://bucket/prefix or memory://name")
