"""The handle of a stored segment: its place, its length and its checksum."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["SegmentHandle"]


@dataclass(frozen=True, slots=True)
class SegmentHandle:
    """One segment: a whole object, or a part of one (a segment written inside a manifest).

    A handle holds names only; location, bucket and credentials come from the configuration of whoever reads it. That
    of a fork names a location too, which its reader opens only within what was named to it.

    Attributes:
        name: Object name relative to the store's location; the key under which shared state is counted.
        offset: Where the segment starts in the object, in bytes; 0 for an object of its own.
        size: Length of the segment in bytes.
        checksum: CRC-32C of those bytes.
    """

    name: str
    size: int
    checksum: int
    offset: int = 0

    def to_wire(self) -> list[object]:
        """Return a plain list for a socket or a manifest."""
        return [self.name, self.size, self.checksum, self.offset]

    @staticmethod
    def from_wire(fields: list[object]) -> SegmentHandle:
        """Rebuild a handle; the inverse of :meth:`to_wire`.

        Raises:
            ValueError: The fields are not a handle's.
        """
        match fields:
            case [str(name), int(size), int(checksum), int(offset)] if size > 0 and offset >= 0:
                return SegmentHandle(name, size, checksum, offset)
        raise ValueError(f"not a segment handle: {fields!r}")
