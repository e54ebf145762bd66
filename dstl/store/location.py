"""Locations: a URL that a user writes, and the store behind it.

This is the one place that takes a location apart. A comma separates two locations where an absolute one follows it:
``scheme:``, ``/`` or ``~/``. Every other comma belongs to the name of a directory. So ``/disk1/s,/disk2/s`` is two
directories and ``/data/my,state`` is one; a directory whose path has ``,/`` in it is written as a URI,
``file:///data/a%2C/b``.
"""

from __future__ import annotations

import os
import re
from urllib.parse import quote, unquote

from dstl.errors import Invalid
from dstl.options import S3Options, SealingOptions
from dstl.private_file import check_strength, read_private_file
from dstl.store.base import ObjectStore, check_name
from dstl.store.local import LocalStore
from dstl.store.memory import MemoryStore
from dstl.store.s3 import S3Store
from dstl.store.sealed import SealedStore
from dstl.store.sharded import ShardedStore

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.\-]*):(.*)", re.DOTALL)
_ABSOLUTE = r"(?:/|~/|[A-Za-z][A-Za-z0-9+.\-]*:[/\\])"
_BETWEEN_LOCATIONS = re.compile(f",(?={_ABSOLUTE})")
_WITH_BLANK = re.compile(rf",\s+{_ABSOLUTE}")
_BUCKET = re.compile(r"[a-z0-9][a-z0-9.\-]{1,61}[a-z0-9]")
_FORMS = "write a directory (/path or file:///path) or s3://bucket/prefix"


def open_store(
    location: str | os.PathLike[str], options: S3Options | None = None, sealing: SealingOptions | None = None
) -> ObjectStore:
    """Return the store at a location. Nothing is contacted or made yet: :func:`~dstl.store.probe.probe` does that.

    ============================  ======================================================================
    ``s3://bucket/prefix``        S3, credentials from the provider chain of the SDK (``s3a://`` as well)
    ``/path``, ``file:///path``   a directory (``file:/path`` as well); a relative path and ``~`` are taken
                                  from now
    ``memory://name/prefix``      this process's memory, shared by name
    several, joined by commas     one store over all of them, see :class:`~dstl.store.sharded.ShardedStore`
    ============================  ======================================================================

    Args:
        location: As above, or a path object. It never holds credentials.
        options: For S3; ignored elsewhere.
        sealing: With which key objects are sealed; None for none.

    Raises:
        Invalid: Not a location, or no key where one is to be.
    """
    stores = [_open_one(one, options or S3Options()) for one in split_locations(location)]
    store = stores[0] if len(stores) == 1 else ShardedStore(stores)
    if sealing is None or sealing.key_file is None:
        return store
    key = read_private_file(sealing.key_file, "sealing key").strip().encode()
    sealed = SealedStore(store, key)
    check_strength(key, "the sealing key")
    return sealed


def local_directories(location: str) -> tuple[str, ...]:
    """Return the paths of those of a location's parts that are directories."""
    parsed = [_parse(one) for one in split_locations(location)]
    return tuple(os.path.abspath(os.path.expanduser(path)) for scheme, path, _ in parsed if not scheme)


def split_locations(location: str | os.PathLike[str]) -> tuple[str, ...]:
    """Return the locations that a text joins by commas, in their order; one where there is no such comma.

    Args:
        location: As :func:`open_store` takes it.

    Raises:
        Invalid: No location is given, or what separates two of them is more than one comma.
    """
    given = os.fspath(location) if isinstance(location, os.PathLike) else location
    if not isinstance(given, str):
        raise Invalid(f"a location is a text or a path object, not {type(given).__name__}: {_FORMS}")
    if not given.strip():
        raise Invalid("a location is a directory, s3://bucket/prefix or memory://name; none was given")
    if "\0" in given:
        raise Invalid("a location holds no NUL character")
    parts = tuple(_BETWEEN_LOCATIONS.split(given))
    if len(parts) > 1 and any(not part or part.endswith(",") for part in parts):
        raise Invalid("several locations are joined by one comma each, and one of them is empty: /disk1/s,/disk2/s")
    if _WITH_BLANK.search(given):
        raise Invalid("several locations are joined by a comma without a blank: /disk1/s,/disk2/s")
    return parts


def absolute_location(location: str | os.PathLike[str]) -> str:
    """Return a location as any process opens it: directories absolute, without ``~``, and all of them as paths.

    Raises:
        Invalid: Not a location.
    """
    return ",".join(_absolute(one) for one in split_locations(location))


def shared_location(location: str | os.PathLike[str]) -> str:
    """Return what :func:`absolute_location` does, of a location that other processes see as this one does.

    Raises:
        Invalid: Not a location, or one of those in memory, which is that of whichever process opens it.
    """
    if any(_parse(one)[0] == "memory" for one in split_locations(location)):
        raise Invalid("memory:// is this process's own memory, which no other sees and ends with it: use another place")
    return absolute_location(location)


def has_scheme(location: str) -> bool:
    """Return whether a text begins with a URI's scheme and not as a path does."""
    return _SCHEME.match(location) is not None


def _absolute(location: str) -> str:
    scheme, path, _ = _parse(location)
    if scheme:
        return location
    path = os.path.abspath(os.path.expanduser(path))
    # The directory that a relative path is taken from may have a name that would be split.
    torn = path.endswith(",") or _BETWEEN_LOCATIONS.search(path) or _WITH_BLANK.search(path)
    return "file://" + quote(path) if torn else path


def _open_one(location: str, options: S3Options) -> ObjectStore:
    scheme, name, prefix = _parse(location)
    if not scheme:
        return LocalStore(name)
    if scheme == "memory":
        return MemoryStore(name, prefix)
    return S3Store(name, prefix, options)


def _parse(location: str) -> tuple[str, str, str]:
    """Return (scheme, name, prefix) of one location; of a directory ("", path, "")."""
    found = _SCHEME.fullmatch(location)
    if found is None:
        return "", location, ""
    scheme, rest = found[1].lower(), found[2]
    if scheme == "file":
        path = unquote(rest.removeprefix("//"))
        if not path.startswith("/") or "\0" in path:
            raise Invalid(f"not a location: {location!r}; write file:///absolute/path")
        return "", path, ""
    if scheme not in ("memory", "s3", "s3a"):
        raise _unknown(found[1])
    if "@" in rest:
        # Not shown: what stands before the sign may be a secret.
        raise Invalid(f"a {scheme}:// location holds no user, key or secret: use the SDK's provider chain")
    if not rest.startswith("//"):
        form = "memory://name" if scheme == "memory" else "s3://bucket/prefix"
        raise Invalid(f"not a location: {location!r}; write {form}")
    name, _, prefix = rest[2:].partition("/")
    prefix = prefix.rstrip("/")
    if scheme != "memory" and _BUCKET.fullmatch(name) is None:
        raise Invalid(f"not a bucket name: {name!r}; write s3://bucket/prefix")
    for part in (name, prefix) if prefix else (name,):
        try:
            check_name(part)
        except Invalid:
            raise Invalid(
                f"not a location: {location!r}; what follows {scheme}:// is letters, digits, '-', '_', '=' and inner "
                "dots, between single slashes"
            ) from None
    return scheme, name, prefix


def _unknown(scheme: str) -> Invalid:
    """Return the error for a scheme; nothing else of the location is shown, for it may hold a secret."""
    if len(scheme) == 1:
        return Invalid(f"not a location: {scheme}: looks like a drive of Windows, which has no store here; {_FORMS}")
    if scheme == "dstl":
        return Invalid(
            f"dstl:// is Spark's checkpoint directory, which dstl files and dstl gc take; of a StateBackend, {_FORMS}: "
            "the location that its _spark is in"
        )
    return Invalid(
        f"no store for {scheme}: locations; {_FORMS}. Another service that speaks S3 is s3:// with "
        f"S3Options(endpoint_url=...); a directory whose name begins so is ./{scheme}:..."
    )
