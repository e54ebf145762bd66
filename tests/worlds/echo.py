"""Calls of a server that is only there to be called, and frames without a socket."""

from dataclasses import dataclass
from typing import ClassVar, TypeVar

from dstl.rpc.codec import Call, Message, Payload, decode_reply, encode_reply
from dstl.rpc.framing import Framing
from dstl.rpc.messages import Done

M = TypeVar("M", bound=Message)


def through_a_frame(reply: M) -> M:
    """Return what the other side makes of a reply."""
    frame = b"".join(Framing().encode(*encode_reply(reply)))
    return decode_reply(type(reply), *Framing().decode(frame[4:]))


@dataclass(frozen=True, slots=True)
class Echoed(Message):
    n: int | None
    data: Payload


@dataclass(frozen=True, slots=True)
class Echo(Call[Echoed]):
    name: ClassVar[str] = "echo"
    n: int | None = None
    data: Payload = b""


@dataclass(frozen=True, slots=True)
class Fail(Call[Done]):
    name: ClassVar[str] = "fail"


@dataclass(frozen=True, slots=True)
class Bug(Call[Done]):
    name: ClassVar[str] = "bug"


@dataclass(frozen=True, slots=True)
class Unknown(Call[Done]):
    name: ClassVar[str] = "__init__"


@dataclass(frozen=True, slots=True)
class Wait(Call[Echoed]):
    name: ClassVar[str] = "wait"


@dataclass(frozen=True, slots=True)
class Watch(Call[Done]):
    name: ClassVar[str] = "watch"
    who: str


@dataclass(frozen=True, slots=True)
class Flood(Call[Echoed]):
    name: ClassVar[str] = "flood"


@dataclass(frozen=True, slots=True)
class TooMuch(Call[Echoed]):
    name: ClassVar[str] = "too_much"
