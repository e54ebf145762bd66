"""Tuples of Python values as flat rows and back."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from pyspark.sql.types import StructType

from dstl.changelog.change_set import MAX_CHANGE_BYTES
from dstl.errors import Invalid, clip
from dstl.state.codec.field_codec import FieldCodec, field_codec, values_by_name
from dstl.state.codec.flat_row import MAX_PLANS, Converter, FlatRow

_REFUSED = (struct.error, TypeError, ValueError, OverflowError, AssertionError, LookupError)


class RowCodec:
    """Turns the tuples of one schema into flat rows and back.

    Args:
        schema: The fields.
        owner: Whose rows they are, for messages.
        codecs: One per field; None: those of the fields' types.
    """

    def __init__(self, schema: StructType, owner: str, codecs: Sequence[FieldCodec] | None = None) -> None:
        self.schema = schema
        self.owner = owner
        self.layout = FlatRow([field.dataType for field in schema.fields])
        self._names = list(schema.names)
        self._codecs = list(codecs or (field_codec(field.dataType) for field in schema.fields))
        self._decoders = [codec.decode for codec in self._codecs]
        self._plans: dict[tuple[type, ...], _Plan] = {}

    def to_wire(self, value: Any) -> list[Any]:
        """Return the wire values of a tuple, list or ``Row``, a dict by name, or of one field a bare string.

        Raises:
            Invalid: Not a row of the schema; names the field.
        """
        fields, owner = self.schema.fields, self.owner
        if isinstance(value, dict):
            try:
                value = values_by_name(value, self._names)
            except ValueError as error:
                raise Invalid(f"{owner}: {error}") from None
        elif isinstance(value, str) and len(fields) == 1:
            value = (value,)
        if not isinstance(value, (tuple, list)):
            takes = f"takes a tuple of {len(fields)} values ({self.schema.simpleString()})"
            raise Invalid(f"{owner} {takes}, not {type(value).__name__}")
        if len(value) != len(fields):
            raise Invalid(f"{owner} takes {len(fields)} values ({self.schema.simpleString()}), not {len(value)}")
        wire: list[Any] = []
        for one, codec, field in zip(value, self._codecs, fields, strict=True):
            try:
                encoded = None if one is None else codec.encode(one)
            except (TypeError, ValueError, OverflowError, AssertionError) as error:
                raise Invalid(f"column {field.name!r} of {owner}: {clip(error)}") from error
            if encoded is None and not field.nullable:
                raise Invalid(f"column {field.name!r} of {owner} is declared NOT NULL and got None")
            wire.append(encoded)
        return wire

    def decode_wire(self, wire: Sequence[Any]) -> tuple[Any, ...]:
        """Return the Python values of wire values."""
        pairs = zip(wire, self._decoders, strict=True)
        return tuple([one if one is None or decode is None else decode(one) for one, decode in pairs])

    def decoder(self, offset: int = 0) -> Callable[[bytes], tuple[Any, ...]]:
        """Return a function that makes a tuple of bytes whose row begins at ``offset``; for errors see ``FlatRow``."""
        return self.layout.reader(offset, self._decoders)

    def numbers(self, offset: int) -> struct.Struct | None:
        """Return what unpacks rows at ``offset`` if all fields are numbers as the wire has them; of rows without nulls.

        It skips whatever is not a slot.
        """
        if self.layout.bodies or any(self._decoders):
            return None
        return struct.Struct(f"<{offset + len(self.layout.blank)}x{self.layout.slots}")

    def encoder(self, prefix: bytes = b"", max_bytes: int = MAX_CHANGE_BYTES) -> Callable[[Any], bytes]:
        """Return a function that makes ``prefix`` and the row of what :meth:`to_wire` takes.

        It raises Invalid as that does, and for a row of more than ``max_bytes``.
        """
        layout, plans, owner = self.layout, self._plans, self.owner
        blank, write = prefix + layout.blank, layout.writer(prefix)
        pack = struct.Struct(f"<{len(blank)}s{layout.slots}").pack

        def encode_checked(value: Any) -> bytes:
            wire = self.to_wire(value)
            try:
                data = write(wire)
            except UnicodeEncodeError as error:
                raise Invalid(f"{owner} has a string that is not one of Unicode: {clip(error)}") from error
            if len(data) > max_bytes:
                raise Invalid(
                    f"a value of {owner} has {len(data)} bytes, above the limit of {max_bytes}: split it over a map or "
                    "list state"
                )
            if isinstance(value, (tuple, list)) and len(plans) < MAX_PLANS:
                types = tuple(map(type, value))
                plans[types] = self._plan(types, prefix)
            return data

        def encode_numbers(value: Any) -> bytes:
            if value.__class__ is tuple or isinstance(value, (tuple, list)):
                try:
                    return pack(blank, *value)
                except _REFUSED:
                    pass  # a null, or an error that has to be named
            return encode(value)

        def encode(value: Any) -> bytes:
            if not isinstance(value, (tuple, list)):
                return encode_checked(value)
            try:
                if native and None not in value:
                    lead, conversions, bodies = native
                else:
                    lead, conversions, bodies = plans[tuple(map(type, value))]
                slots, tail = list(value), b""
                for i, convert in conversions:
                    slots[i] = convert(slots[i])
                for i, to_bytes in bodies:
                    tail += to_bytes(slots[i])
                    slots[i] = len(tail)
                data = pack(lead, *slots) + tail
            except _REFUSED:
                return encode_checked(value)
            return data if len(data) <= max_bytes else encode_checked(value)

        natives = [codec.native for codec in self._codecs]
        native: _Plan | None = None
        # struct takes any object for a boolean.
        if all(natives) and bool not in natives:
            native = self._plan([kind or object for kind in natives], prefix)
        return encode_numbers if native and not layout.bodies else encode

    def _plan(self, types: Sequence[type], prefix: bytes) -> _Plan:
        """Return what a row needs whose values have these Python types and have passed :meth:`to_wire`.

        Few combinations occur, so that one look-up replaces the check of every field.
        """
        conversions: list[tuple[int, Converter]] = []
        to_bytes = {i: each for i, each, _ in self.layout.bodies}
        for i, (kind, codec, zero) in enumerate(zip(types, self._codecs, self.layout.zeros, strict=True)):
            if kind is type(None):
                if i in to_bytes:
                    to_bytes[i] = partial(_constant, b"")
                else:
                    conversions.append((i, partial(_constant, zero)))
            elif codec.native is not kind:
                conversions.append((i, codec.encode))
        lead = prefix + self.layout.bitmap([kind is type(None) for kind in types])
        return lead, tuple(conversions), tuple(to_bytes.items())


_Plan = tuple[bytes, tuple[tuple[int, Converter], ...], tuple[tuple[int, Callable[[Any], bytes]], ...]]
"""Of the rows with certain Python types: what goes before the slots, what converts fields, and what makes bytes."""


def _constant(found: Any, value: Any) -> Any:
    return found
