"""State values as bytes, one at a time.

::

    u8      schema version, 1..127; bit 7 set when a write time follows
    [i64    write time, milliseconds since 1970, little-endian]
    row     the fields (dstl.state.codec.flat_row)

``value_columns`` reads and writes the same bytes a column at a time. Nothing is ever pickled. A value of an older
schema version is read with that version's schema and then converted to the newest (``schema_evolution``); only what
the processor writes is written anew.

Time is the batch's processing time, fixed for the whole batch and the same when the batch runs again, so a value never
disappears between two reads. A read of an expired value finds nothing, and removes nothing: whether it is still there
depends on the sweep that drops such values in the background (``materializer.expiry``), and attempts at one task
must make the same changes.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Any

from pyspark.sql.types import StructType

from dstl.changelog.change_set import MAX_CHANGE_BYTES
from dstl.errors import CorruptData, Invalid, clip
from dstl.state.codec.flat_row import FlatRow
from dstl.state.codec.row_codec import RowCodec
from dstl.state.codec.schema_evolution import conversion

HAS_WRITE_TIME = 0x80
"""Bit of a value's first byte: eight bytes of write time follow."""

WRITE_TIME = struct.Struct("<q")
MAX_SCHEMA_VERSIONS = 127  # what seven bits hold, without 0

Encode = Callable[[Any], bytes]
Decode = Callable[[bytes], tuple[Any, ...]]


class ValueCodec:
    """Turns tuples into bytes and back for one state.

    Args:
        name: The state's name, for messages.
        schemas: Every schema that the state has had, oldest first; the last one is written.
        write_time_ms: Put this write time into every value (states with a time to live); None for none.
        max_bytes: No value is longer.

    Attributes:
        encode: Tuple (or list, ``Row``, dict by name, or of one column a bare string) to bytes. Raises Invalid naming
            the state and the field.
        decode: Bytes to tuple. Raises CorruptData when the bytes are not a value of any of the schemas.
    """

    def __init__(
        self,
        name: str,
        schemas: Sequence[StructType],
        *,
        write_time_ms: int | None = None,
        max_bytes: int = MAX_CHANGE_BYTES,
    ) -> None:
        if not 0 < len(schemas) <= MAX_SCHEMA_VERSIONS:
            raise Invalid(f"state {name!r} has {len(schemas)} schema versions; 1 to {MAX_SCHEMA_VERSIONS} are possible")
        self._name = name
        self.schema = schemas[-1]
        version, rows = len(schemas), RowCodec(schemas[-1], f"state {name!r}")
        timed = HAS_WRITE_TIME if write_time_ms is not None else 0
        prefix = bytes([version | timed])
        if write_time_ms is not None:
            prefix += WRITE_TIME.pack(write_time_ms)
        self.encode: Encode = rows.encoder(prefix, max_bytes)
        self._schemas = tuple(schemas)
        self._rows = rows
        self._numbers = rows.numbers(len(prefix))
        # The bytes of such a value that say that it is one.
        nulls = range(len(prefix), len(prefix) + len(rows.layout.blank))
        self._plain = ((0, prefix[0]), *((at, 0) for at in nulls))
        self._decoders: list[Decode] = [self._decode_older] * 256
        for flag, offset in ((0, 1), (HAS_WRITE_TIME, 1 + WRITE_TIME.size)):
            self._decoders[version | flag] = rows.decoder(offset)
        self.decode: Decode = self._decode

    def _decode(self, data: bytes) -> tuple[Any, ...]:
        try:
            return self._decoders[data[0]](data)
        except Exception as error:
            found = data[0] & ~HAS_WRITE_TIME if data else None
            raise CorruptData(
                f"a value of state {self._name!r} ({len(data)} bytes, schema version {found}) cannot be decoded: "
                f"{clip(error)}; was it written by a newer version of the processor?"
            ) from error

    def decode_many(self, values: list[bytes | None]) -> list[Any]:
        """Return values as tuples if all are numbers without nulls, of the newest schema; else as they are.

        What stays bytes is for :attr:`decode`, which also says what is wrong with it.
        """
        shape = self._numbers
        present: list[Any] = values if None not in values else [value for value in values if value is not None]
        if shape is None or set(map(len, present)) != {shape.size}:
            return values
        data = b"".join(present)
        for at, byte in self._plain:
            if data[at :: shape.size].count(byte) != len(present):
                return values
        found = shape.iter_unpack(data)
        return list(found) if present is values else [None if value is None else next(found) for value in values]

    def _decode_older(self, data: bytes) -> tuple[Any, ...]:
        """Decode the first value of an older version, and make the decoder of the next ones."""
        kind = data[0]
        version = kind & ~HAS_WRITE_TIME
        if not 0 < version < len(self._schemas):
            raise ValueError("no such schema version")
        row = FlatRow([field.dataType for field in self._schemas[version - 1].fields])
        wire = row.reader(1 + (WRITE_TIME.size if kind & HAS_WRITE_TIME else 0))
        convert, decoded = conversion(self._schemas[version - 1 :]), self._rows.decode_wire
        if convert is None:
            self._decoders[kind] = lambda value: decoded(wire(value))
        else:
            self._decoders[kind] = lambda value: decoded(convert(wire(value)))
        return self._decoders[kind](data)


def write_time_ms(value: bytes) -> int | None:
    """Return when an encoded value was written (milliseconds since 1970), None where it does not say."""
    if len(value) > WRITE_TIME.size and value[0] & HAS_WRITE_TIME:
        written: int = WRITE_TIME.unpack_from(value, 1)[0]
        return written
    return None


class TimeToLive:
    """Tells which of a state's values are gone at one batch's time.

    Args:
        ttl_ms: 0 for states that live for ever.
        now_ms: The batch's processing time.
    """

    def __init__(self, ttl_ms: int, now_ms: int) -> None:
        self.ttl_ms = ttl_ms
        self._latest_dead = now_ms - ttl_ms

    def find_expired(self, values: Sequence[bytes | None]) -> list[int]:
        """Return the positions of the values that are gone."""
        if not self.ttl_ms:
            return []
        return [i for i, value in enumerate(values) if value is not None and self.is_dead(value)]

    def is_dead(self, value: bytes) -> bool:
        """Return True where a value is gone; one without a write time never is."""
        if not self.ttl_ms:
            return False
        written = write_time_ms(value)
        return written is not None and written <= self._latest_dead
