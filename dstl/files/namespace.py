"""Names below a streaming query's checkpoint directory: which are barriers, which state files, which snapshots. Pure.

The grammar is Spark's own (``metadata``, ``offsets/N``, ``commits/N``, ``sources/S/..``, ``state/O/P/..``); it tells
where a directory may end and a file's name in it begin.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from urllib.parse import quote, unquote, urlsplit

from dstl.errors import Invalid
from handles.file_record import is_path

SCHEME = "dstl"
METADATA = "metadata"
"""The file by which a query begins: its id."""
OBJECTS = "_dstl"
"""The log's objects lie in this directory of the plain one."""
QUERY = "_spark"
"""Ends the root of a directory that lies in the log of a ``StateBackend``: the rest of it is the backend's location."""
_INNER = re.compile(
    r"metadata|(?:offsets|commits)(?:/[^/]+)?|sources(?:/[^/]+(?:/.*)?)?|state(?:/\d+(?:/(?:\d+|_\w+)(?:/.*)?)?)?",
    re.DOTALL,
)
_STATE = re.compile(r"(state/\d+/\d+(?:/[^/]+)*?)/(\d+)(?:_([0-9A-Za-z-]+))?\.(changelog|delta|zip|snapshot)(\.crc)?")
_DESCRIPTION = re.compile(r"state/\d+/(?:_metadata/v\d+/|_stateSchema/[^/]+/)(\d+)(?:_[0-9A-Za-z-]+)?(?:\.crc)?")
_OPERATOR_METADATA = re.compile(r"state/\d+/_metadata/metadata")
_SNAPSHOT = re.compile(r"state/\d+/\d+/(?:.*\.(?:zip|snapshot)(?:\.crc)?|(?:.*/)?SSTs/.*)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class FilePath:
    """A path of ``dstl://`` taken apart.

    Attributes:
        root: The checkpoint directory, as a URI without a slash at its end.
        inner: The path in it; empty for the directory itself.
    """

    root: str
    inner: str

    @staticmethod
    def readings(path: str) -> list[FilePath]:
        """Take a path apart in each way that the grammar allows, the longest root first: that is all of the path.

        Raises:
            Invalid: It is not of ``dstl://``.
        """
        if not path.startswith(f"{SCHEME}:/"):
            raise Invalid(f"not a path of {SCHEME}://: {path!r}")
        authority, _, rest = path.removeprefix(f"{SCHEME}:").removeprefix("//").partition("/")
        front = f"{SCHEME}://{authority}"
        parts = [part for part in rest.split("/") if part]
        if ".." in parts:
            raise Invalid(f"a path of {SCHEME}:// holds no '..': {path!r}")
        found = [FilePath("/".join((front, *parts)), "")]
        for i in reversed(range(len(parts))):
            inner = "/".join(parts[i:])
            operator = i >= 3 and _OPERATOR_METADATA.fullmatch("/".join(parts[i - 3 :]))
            if is_of_a_query(inner) and is_path(inner) and not operator:
                found.append(FilePath("/".join((front, *parts[:i])), inner))
        return found


@dataclass(frozen=True, slots=True)
class StateFile:
    """A versioned file of a state store.

    Attributes:
        store: Its directory: operator, partition, and the store's name where it has one.
        version: The version that it leads to, or holds.
        unique_id: Of checkpoint format 2; empty in format 1.
        kind: ``changelog``, ``delta``, ``zip`` or ``snapshot``.
        is_checksum: It is the checksum of one.
    """

    store: str
    version: int
    unique_id: str
    kind: str
    is_checksum: bool

    @staticmethod
    def of(inner: str) -> StateFile | None:
        """Return the state file that a path names; None for any other."""
        found = _STATE.fullmatch(inner)
        if found is None:
            return None
        return StateFile(found[1], int(found[2]), found[3] or "", found[4], found[5] is not None)


def state_version(inner: str) -> int | None:
    """Return the version of a state store's file; None for any other path."""
    found = _STATE.fullmatch(inner)
    return int(found[2]) if found is not None else None


def description_batch(inner: str) -> int | None:
    """Return the batch from which on a file describes an operator and its state's columns; None for any other path."""
    found = _DESCRIPTION.fullmatch(inner)
    return int(found[1]) if found is not None else None


def is_of_the_driver(inner: str) -> bool:
    """Return True for what the driver writes before ``offsets/N``, and that must be durable with it."""
    return not inner.startswith("state/")


def is_snapshot(inner: str) -> bool:
    """Return True for a file of a whole state: a zip, a snapshot, an SST file."""
    return _SNAPSHOT.fullmatch(inner) is not None


def is_of_a_query(inner: str) -> bool:
    """Return True for a path that Spark may have written into a checkpoint directory."""
    return _INNER.fullmatch(inner) is not None


def location_of(root: str) -> str:
    """Return the store's location of a checkpoint directory: ``_dstl`` below the plain path.

    ``dstl://bucket/path`` is in the bucket, ``dstl:///path`` in the file system. The root of a ``StateBackend`` ends
    with ``_spark``, and its log is the backend's: the location above.

    Raises:
        Invalid: It names no place.
    """
    plain = plain_location_of(root)
    return plain.removesuffix(f"/{QUERY}") if is_of_a_backend(root) else f"{plain}/{OBJECTS}"


def is_of_a_backend(root: str) -> bool:
    """Return True for the root of a directory that lies in the log of a ``StateBackend``."""
    return root.endswith(f"/{QUERY}")


def backend_root(location: str) -> str:
    """Return the root of the checkpoint directory that lies in the log of a backend: :func:`location_of` leads back.

    What Hadoop would have to escape in a path stands there as ``~`` and two digits, for Spark looks for directories
    whose names older versions have escaped.

    Args:
        location: The backend's, or the first of several; absolute, a directory or of S3.
    """
    _, is_s3, path = location.partition("s3a://" if location.startswith("s3a://") else "s3://")
    path = quote(path if is_s3 else location, safe="/").replace("~", "%7E").replace("%", "~")
    return f"{SCHEME}://{path.rstrip('/')}/{QUERY}"


def plain_location_of(root: str) -> str:
    """Return the place where a checkpoint directory of the same path lies as plain files.

    Raises:
        Invalid: It names no place.
    """
    parts = urlsplit(root)
    if parts.scheme != SCHEME or parts.query or parts.fragment:
        raise Invalid(
            f"not a checkpoint directory: {root!r}; write {SCHEME}://bucket/path or {SCHEME}:///path, with %3F and %23 "
            "for ? and #, or the checkpoint_location of a StateBackend as it shows it"
        )
    path = parts.path.strip("/")
    if is_of_a_backend(root):
        path = unquote(path.replace("~", "%"))
    if parts.netloc:
        return f"s3://{parts.netloc}/{path}".rstrip("/")
    if not path:
        raise Invalid(f"{root} names no directory: write {SCHEME}://bucket/path or {SCHEME}:///path")
    return f"/{path if is_of_a_backend(root) else unquote(path)}"
