"""Messages: dataclasses that become frames and come back, by one encoder and one decoder for all of them.

A field may be an int, a str, a bytes, a bool, a float, a union of such with None, a tuple, a mapping, another
dataclass, or a pydantic model. The last field of a message may be the frame's payload: it is annotated
:data:`Payload`, and its bytes are never packed. Or some of the last fields are :data:`Bulk`: many keys or values, which
lie in the payload, packed together, so that they may be longer than a header. Type hints are resolved once for each
class. A message's fields stand under their names, a nested dataclass is a list of its values.
"""

from __future__ import annotations

import dataclasses
import re
import types
import typing
from collections.abc import Callable, Mapping
from functools import cache
from operator import attrgetter
from typing import Annotated, Any, ClassVar, Generic, TypeVar

import msgpack

from dstl.errors import CorruptData, DstlError, Invalid, brief
from dstl.rpc.handshake import Role
from dstl.rpc.protocol import BEAT, unpack

Payload = bytes | memoryview
"""The type of the field that is the frame's payload."""

_T = TypeVar("_T")
_BULK = "bulk"
Bulk = Annotated[_T, _BULK]
"""A field that lies in the frame's payload, with the message's other ones: ``Bulk[tuple[bytes, ...]]``."""

CALL = "call"
"""The header field of a request that names the call."""

_RESERVED = {CALL, BEAT, "error", "refused"}
_ADVICE = "do both sides run the same version of DSTL?"

R = TypeVar("R", bound="Message")
_M = TypeVar("_M", bound="Message")
_Convert = Callable[[Any], Any]


class Message:
    """A request or a reply; its subclasses are frozen dataclasses with slots."""

    __slots__ = ()


class Call(Message, Generic[R]):
    """A request whose reply is an ``R``.

    Attributes:
        name: The call, as a frame names it: the class's name in small letters, unless the class says another.
        reply: The class of its reply: what ``Call``, or a base of it, is derived with.
        role: In which capacity a peer may make it, as the class or its base says; None: in any.
    """

    __slots__ = ()
    name: ClassVar[str]
    reply: ClassVar[Any]
    role: ClassVar[Role | None] = None

    def __init_subclass__(cls, *, name: str = "", role: Role | None = None) -> None:
        # A dataclass with slots is made twice, the second time of what the first one holds.
        if "name" not in cls.__dict__:
            cls.name = name or re.sub(r"(?<!^)(?=[A-Z])", "_", cls.__name__).lower()
        if role is not None:
            cls.role = role
        for base in cls.__dict__.get("__orig_bases__", ()):
            if issubclass(typing.get_origin(base) or object, Call):
                (cls.reply,) = typing.get_args(base)


def encode_message(message: Message) -> tuple[dict[str, Any], Payload]:
    """Return the header and the payload of a request or a reply."""
    shape = _shape(type(message))
    header, payload = shape.encode(message)
    if shape.call:
        header[CALL] = shape.call
    return header, payload


def decode_message(kind: type[_M], header: dict[str, Any], payload: memoryview) -> _M:
    """Return the message of this class that a header, of a request without its :data:`CALL`, and a payload hold.

    Raises:
        Invalid: A field of a request is missing, unknown or of another type.
        CorruptData: One of a reply is.
    """
    message: _M = _shape(kind).decode(header, payload)
    return message


def reply_of(kind: type[Call[R]]) -> type[R]:
    """Return the class of a call's reply."""
    found: type[R] = kind.reply
    return found


@dataclasses.dataclass(frozen=True, slots=True)
class _Type:
    """Converters of one annotated type.

    Attributes:
        plain: Classes of values that are taken as they are.
        encode: Makes plain data of a value; None: it is plain.
        decode: Makes a value of what is not plain; raises ``ValueError``.
    """

    plain: frozenset[type]
    encode: _Convert | None
    decode: _Convert

    def read(self, value: Any) -> Any:
        return value if type(value) in self.plain else self.decode(value)


class _Shape:
    """The fields of one class, in order."""

    def __init__(self, kind: type[Any]) -> None:
        hints = typing.get_type_hints(kind, include_extras=True)
        names = [field.name for field in dataclasses.fields(kind)]
        bulk = [name for name in names if _BULK in getattr(hints[name], "__metadata__", ())]
        payloads = [name for name in names if hints[name] == Payload] or bulk
        is_last = names[len(names) - len(payloads) :] == payloads
        if not is_last or (len(payloads) > 1 and not bulk) or _RESERVED.intersection(names):
            raise TypeError(f"{kind.__name__}: a payload is the last field, and no field is called as the header's own")
        self._kind = kind
        self.call: str = kind.name if issubclass(kind, Call) else ""
        self._payload = payloads[0] if payloads and not bulk else ""
        self._bulk = [(name, _type_of(typing.get_args(hints[name])[0])) for name in bulk]
        self._names = names[: len(names) - len(payloads)]
        self._types = [_type_of(hints[name]) for name in self._names]
        self._converted = [(n, t.encode) for n, t in zip(self._names, self._types, strict=True) if t.encode]
        self._get: Callable[[Any], Any] = (
            attrgetter(*self._names) if len(self._names) > 1 else lambda m: [getattr(m, n) for n in self._names]
        )

    def encode(self, message: Any) -> tuple[dict[str, Any], Payload]:
        header = dict(zip(self._names, self._get(message), strict=True))
        for name, convert in self._converted:
            header[name] = convert(header[name])
        if not self._bulk:
            return header, getattr(message, self._payload) if self._payload else b""
        values = [(each.encode, getattr(message, name)) for name, each in self._bulk]
        return header, msgpack.packb([encode(value) if encode else value for encode, value in values])

    def decode(self, header: dict[str, Any], payload: memoryview) -> Any:
        values = []
        name = ""
        try:
            for name, each in zip(self._names, self._types, strict=True):
                value = header[name]
                values.append(value if type(value) in each.plain else each.decode(value))
            if len(header) == len(values) and self._bulk:
                name = self._bulk[0][0]
                for (field, each), value in zip(self._bulk, self._unpacked(payload), strict=True):
                    name = field
                    values.append(each.read(value))
        except KeyError:
            raise self._refusal(f"has no field {name!r}") from None
        except ValueError as wrong:
            raise self._refusal(f"has a field {name!r} that is malformed: {wrong}") from None
        if len(header) + len(self._bulk) != len(values):
            unknown = sorted(map(str, header.keys() - set(self._names)))
            raise self._refusal(f"has a field {brief(unknown[0])} that is unknown")
        if self._payload:
            values.append(payload)
        elif len(payload) and not self._bulk:
            raise self._refusal(f"has a payload of {len(payload)} bytes, and none is due")
        try:
            return self._kind(*values)
        except ValueError as wrong:
            raise self._refusal(f"is malformed: {wrong}") from None

    def _unpacked(self, payload: memoryview) -> list[Any]:
        """Return what a payload of bulk fields holds.

        Raises:
            ValueError: Something else.
        """
        found = unpack(payload)
        if type(found) is not list or len(found) != len(self._bulk):
            raise ValueError(f"the payload is not the list of {len(self._bulk)} fields")
        return found

    def _refusal(self, what: str) -> DstlError:
        side, error = ("request", Invalid) if self.call else ("reply", CorruptData)
        return error(f"the {side} {self._kind.__name__} {what}; {_ADVICE}")

    def to_list(self, value: Any) -> list[Any]:
        """Return the values of a nested dataclass."""
        header, _ = self.encode(value)
        return list(header.values())

    def from_list(self, plain: Any) -> Any:
        """Return a nested dataclass."""
        if type(plain) is not list or len(plain) != len(self._names):
            raise ValueError(f"{brief(plain)} is not the {len(self._names)} values of a {self._kind.__name__}")
        return self._kind(*(each.read(value) for each, value in zip(self._types, plain, strict=True)))


_shape: Callable[[Any], _Shape] = cache(_Shape)


def _refuse(names: str) -> _Convert:
    def refuse(value: Any) -> Any:
        raise ValueError(f"{brief(value)} is not of type {names}")

    return refuse


@cache
def _type_of(hint: Any) -> _Type:
    """Return how values of an annotation are written and read.

    Raises:
        TypeError: No message can hold it.
    """
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint in (int, str, bytes, bool):
        return _Type(frozenset({hint}), None, _refuse(hint.__name__))
    if hint is float:
        refuse = _refuse("float")
        return _Type(frozenset({float}), None, lambda value: float(value) if type(value) is int else refuse(value))
    if hint in (None, type(None)):
        return _Type(frozenset({type(None)}), None, _refuse("None"))
    if origin in (types.UnionType, typing.Union):
        return _union(args)
    if origin is tuple:
        return _tuple(args)
    if origin is not None and issubclass(origin, Mapping):
        return _mapping_type(*args)
    if dataclasses.is_dataclass(hint):
        shape = _shape(hint)
        return _Type(frozenset(), shape.to_list, shape.from_list)
    if hasattr(hint, "model_validate"):
        return _Type(frozenset(), lambda model: model.model_dump(), hint.model_validate)
    raise TypeError(f"a message cannot hold {hint!r}")


def _union(args: tuple[Any, ...]) -> _Type:
    """Return a union: any number of plain types, and at most one other."""
    members = [_type_of(each) for each in args]
    plain = frozenset[type]().union(*(each.plain for each in members))
    others = [each for each in members if each.encode is not None or not each.plain]
    if not others:
        return _Type(plain, None, _refuse(" | ".join(sorted(each.__name__ for each in plain))))
    if len(others) > 1:
        raise TypeError(f"a message cannot tell {args} apart")
    (other,) = others
    encode = other.encode
    if encode is None:
        return _Type(plain, None, other.decode)
    return _Type(plain, lambda value: value if type(value) in plain else encode(value), other.decode)


def _tuple(args: tuple[Any, ...]) -> _Type:
    if len(args) == 2 and args[1] is Ellipsis:
        return _sequence(_type_of(args[0]))
    items = [_type_of(each) for each in args]

    def decode(value: Any) -> Any:
        if type(value) is not list or len(value) != len(items):
            raise ValueError(f"{brief(value)} is not a tuple of {len(items)}")
        return tuple(item.read(each) for item, each in zip(items, value, strict=True))

    if all(item.encode is None for item in items):
        return _Type(frozenset(), None, decode)
    return _Type(
        frozenset(),
        lambda value: [i.encode(v) if i.encode else v for i, v in zip(items, value, strict=True)],
        decode,
    )


def _sequence(item: _Type) -> _Type:
    plain, encode, read = item.plain, item.encode, item.read

    def decode(value: Any) -> Any:
        if type(value) is not list:
            raise ValueError(f"{brief(value)} is not a tuple")
        return tuple(value) if plain.issuperset(map(type, value)) else tuple(map(read, value))

    return _Type(frozenset(), (lambda value: list(map(encode, value))) if encode else None, decode)


def _mapping_type(key: Any, value: Any) -> _Type:
    keys, values = _type_of(key), _type_of(value)
    encode = values.encode

    def decode(plain: Any) -> Any:
        if type(plain) is not dict:
            raise ValueError(f"{brief(plain)} is not a mapping")
        return {keys.read(name): values.read(each) for name, each in plain.items()}

    if encode is None:
        return _Type(frozenset(), dict, decode)
    return _Type(frozenset(), lambda mapping: {name: encode(each) for name, each in mapping.items()}, decode)
