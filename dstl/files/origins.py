"""The locations that a checkpoint directory's records may name: who writes a record must not choose what is opened."""

from __future__ import annotations

from collections.abc import Callable, Collection
from urllib.parse import quote

from dstl.errors import Invalid, MissingState
from dstl.files.namespace import OBJECTS, SCHEME, is_of_a_backend, location_of, plain_location_of
from dstl.store.base import ObjectStore
from dstl.store.location import split_locations

OpenStore = Callable[[str], ObjectStore]
"""Opens the store of a location."""


class Origins:
    """Opens the directories whose objects a fork uses: those beside it, and those that the operator has named.

    Beside a directory is what has the same bucket, or the same parent directory.

    Args:
        root: The directory.
        also: Roots of directories elsewhere that it may use.
        open_store: Opens a location.

    Raises:
        Invalid: One of ``also`` is no root.
    """

    def __init__(self, root: str, also: Collection[str], open_store: OpenStore) -> None:
        self._root, self._open_store = root, open_store
        self._named = {place(each) for each in also for place in (location_of, plain_location_of)}

    def allows(self, location: str) -> bool:
        """Return True where a record may name a location."""
        return location in self._named or (not is_of_a_backend(self._root) and self._is_beside(location))

    def open(self, location: str) -> ObjectStore:
        """Open a location that a record names.

        Raises:
            MissingState: It is not beside the directory, and nobody has named it.
        """
        if not self.allows(location):
            raise MissingState(
                f"a record of {self._root} names objects of {location}, which is neither of its bucket nor beside it, "
                f"so nothing of it is opened. Where it was forked from there, say so: --also {root_of(location)} of "
                f"dstl files, spark.dstl.also={root_of(location)} of the application"
            )
        return self._open_store(location)

    def _is_beside(self, location: str) -> bool:
        own, other = plain_location_of(self._root).split("/"), location.removesuffix(f"/{OBJECTS}").split("/")
        try:
            if {"..", "."} & set(other) or len(split_locations(location)) != 1:
                return False
        except Invalid:
            return False
        return own[:3] == other[:3] if own[0] == "s3:" else own[:-1] == other[:-1] and bool(other[-1])


def root_of(location: str) -> str:
    """Return the directory of a location, its objects' or its plain files'."""
    plain = location.removesuffix(f"/{OBJECTS}")
    return plain.replace("s3://", f"{SCHEME}://", 1) if plain.startswith("s3://") else f"{SCHEME}://{quote(plain)}"
