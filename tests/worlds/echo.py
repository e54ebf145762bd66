"""Calls of a server that is only there to be called, a server that is none, and frames without a socket."""

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from dstl.rpc.client import Address
from dstl.rpc.codec import Call, Message, Payload, decode_message, encode_message
from dstl.rpc.messages import Done
from dstl.rpc.protocol import Framing

M = TypeVar("M", bound=Message)


def through_a_frame(reply: M) -> M:
    """Return what the other side makes of a reply."""
    frame = b"".join(Framing().encode(*encode_message(reply)))
    return decode_message(type(reply), *Framing().decode(frame[4:]))


@dataclass(frozen=True, slots=True)
class Echoed(Message):
    n: int | None
    data: Payload


@dataclass(frozen=True, slots=True)
class Echo(Call[Echoed]):
    n: int | None = None
    data: Payload = b""


@dataclass(frozen=True, slots=True)
class Fail(Call[Done]):
    pass


@dataclass(frozen=True, slots=True)
class Bug(Call[Done]):
    pass


@dataclass(frozen=True, slots=True)
class Unknown(Call[Done], name="__init__"):
    pass


@dataclass(frozen=True, slots=True)
class Wait(Call[Echoed]):
    pass


@dataclass(frozen=True, slots=True)
class Watch(Call[Done]):
    who: str


@dataclass(frozen=True, slots=True)
class Flood(Call[Echoed]):
    pass


@dataclass(frozen=True, slots=True)
class TooMuch(Call[Echoed]):
    pass


@contextlib.contextmanager
def impostor(behave: Callable[[socket.socket], None]) -> Iterator[Address]:
    """Listen on a port, on a thread, and treat every connection as the test says."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                peer, _ = listener.accept()
                with peer, contextlib.suppress(OSError):
                    behave(peer)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield Address("127.0.0.1", listener.getsockname()[1])
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join(5)
