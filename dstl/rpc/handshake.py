"""The handshake of every socket: who is there, for what, at which address; and the keys of the connection. No I/O.

The server sends its version and a nonce. A client of another version answers with its own and goes, so that both sides
know of it. Any other answers with a nonce, the role in which it comes, and the address
that it dialled, twice: as it knows it, and as its socket names it. Both then prove that they know the application's
secret, by HMAC-SHA256 over all of that, without sending it; from the same the keys of both directions are derived. So

- a peer that does not know the secret can pass a handshake on, but has no key, and can send no frame after it;
- a handshake that is passed on to another server than the one that was dialled fails there, for it is neither known by
  that name nor does its socket have that address;
- a peer may call only what is for its role (the server's business).

Over a unix socket the kernel says whose process is at the other end. It must be of this process's user, and then frames
carry no MAC: an attacker who could change them could as well change the memory of either process.

What a peer says before it has proved itself is not trusted: its refusals become errors in our own words.
"""

from __future__ import annotations

import hmac
import ipaddress
import os
import secrets
import socket
import struct
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import msgpack

from dstl.errors import AccessDenied, DstlError, Invalid, Unavailable
from dstl.rpc.protocol import PROTOCOL_VERSION, FrameMac, Framing, Secret

NONCE_BYTES = 32  # as many as SHA-256 makes: none comes twice
_MAX_NAME = 512  # host names have 253 characters, and an answer must fit a handshake's frame
_SAME_VERSION = "run the same version of DSTL on both sides"


class Role(StrEnum):
    """In which capacity a process calls another one."""

    COORDINATOR = "coordinator"
    TASK_MANAGER = "task_manager"
    WORKER = "worker"


class Refusal(AccessDenied):
    """A peer is not let in.

    Attributes:
        reason: What the peer is told: one word.
    """

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason

    def to_wire(self) -> dict[str, Any]:
        """Return the header that tells the peer."""
        return {"refused": self.reason}


@dataclass(frozen=True, slots=True)
class _Agreed:
    """The facts that both sides prove: everything that was said."""

    role: Role
    dialled: str
    reached: str
    server_nonce: bytes
    client_nonce: bytes

    def proof(self, secret: Secret, side: str) -> bytes:
        said = [PROTOCOL_VERSION, side, self.role.value, self.dialled, self.reached]
        return hmac.digest(secret.reveal(), msgpack.packb([*said, self.server_nonce, self.client_nonce]), "sha256")

    def mac(self, secret: Secret, sender: str) -> FrameMac:
        return FrameMac(self.proof(secret, f"key of the {sender}'s frames"))


class ServerHandshake:
    """The serving side of one handshake.

    Args:
        secret: The application's.
        names: Addresses by which this server is known, as ``host:port``, or, over a unix socket, its path.
        address: The connection's own address at this end: see :func:`socket_address`.
    """

    def __init__(self, secret: Secret, names: frozenset[str], address: str) -> None:
        self._secret = secret
        self._names = names
        self._address = address
        self._nonce = secrets.token_bytes(NONCE_BYTES)

    def challenge(self) -> dict[str, Any]:
        """Return the first header, the server's."""
        return {"version": PROTOCOL_VERSION, "nonce": self._nonce}

    def accept(self, answer: dict[str, Any], *, vouched: bool) -> tuple[Role, dict[str, Any], Framing]:
        """Check the client's answer; returns its role, the last header, and how frames are written from then on.

        Args:
            answer: What came.
            vouched: The kernel says who the peer is: no MACs.

        Raises:
            Refusal: The client is not let in.
        """
        if answer.get("version") != PROTOCOL_VERSION:
            theirs = _number(answer.get("version"))
            raise Refusal(
                "version",
                f"a client speaks protocol {theirs}, this service {PROTOCOL_VERSION}: {_SAME_VERSION}",
            )
        match answer:
            case {"nonce": bytes(nonce), "role": str(role), "dialled": str(dialled), "reached": str(reached)} if len(
                nonce
            ) == NONCE_BYTES and role in set(Role):
                agreed = _Agreed(Role(role), dialled, reached, self._nonce, nonce)
            case _:
                raise Refusal("malformed", "a malformed handshake was refused")
        _check(agreed.proof(self._secret, "client"), answer.get("proof"), "client", "a peer")
        if dialled not in self._names and (not reached or reached != self._address):
            raise Refusal(
                "address",
                f"a {role} has dialled {dialled} ({reached}) and reached {self._address or sorted(self._names)}: this "
                "service is not known by that address",
            )
        framing = Framing()
        if not vouched:
            framing = Framing(agreed.mac(self._secret, "server"), agreed.mac(self._secret, "client"))
        return agreed.role, {"proof": agreed.proof(self._secret, "server")}, framing


class ClientHandshake:
    """The calling side of one handshake.

    Args:
        secret: The application's.
        role: In which capacity this process calls.
        dialled: The server's address as this process knows it: ``host:port``, or a socket path.
        reached: The server's address as this process's socket names it: see :func:`socket_address`.
    """

    def __init__(self, secret: Secret, role: Role, dialled: str, reached: str) -> None:
        self._secret = secret
        self._role = role
        self._dialled = dialled[:_MAX_NAME]
        self._reached = reached
        self._agreed: _Agreed | None = None
        self._version: object = None

    def answer(self, challenge: dict[str, Any]) -> dict[str, Any]:
        """Return the client's header, given the server's first.

        Raises:
            Unavailable: It is no DSTL service, or has no room for now.
            AccessDenied: It does not want this process.
        """
        self._raise_refusal(challenge)
        nonce, version = challenge.get("nonce"), challenge.get("version")
        if not isinstance(nonce, bytes) or len(nonce) != NONCE_BYTES:
            raise no_service(self._dialled)
        self._version = version
        if version != PROTOCOL_VERSION:
            return {"version": PROTOCOL_VERSION}
        own = secrets.token_bytes(NONCE_BYTES)
        self._agreed = _Agreed(self._role, self._dialled, self._reached, nonce, own)
        return {
            "version": PROTOCOL_VERSION,
            "nonce": own,
            "role": self._role.value,
            "dialled": self._dialled,
            "reached": self._reached,
            "proof": self._agreed.proof(self._secret, "client"),
        }

    def check_version(self) -> None:
        """Refuse a server of another version, once the answer was sent: then its log says the same.

        Raises:
            Invalid: Names both versions.
        """
        if self._version != PROTOCOL_VERSION:
            raise Invalid(
                f"the service at {self._dialled} speaks protocol {_number(self._version)}, this process "
                f"{PROTOCOL_VERSION}: {_SAME_VERSION}"
            )

    def finish(self, answer: dict[str, Any], *, vouched: bool) -> Framing:
        """Check the server's last header and return how frames are written from then on.

        Raises:
            AccessDenied: It does not know the secret, or does not want this process.
            Unavailable: It has no room for now.
        """
        assert self._agreed is not None
        self._raise_refusal(answer)
        _check(self._agreed.proof(self._secret, "server"), answer.get("proof"), "server", f"what is at {self._dialled}")
        if vouched:
            return Framing()
        return Framing(self._agreed.mac(self._secret, "client"), self._agreed.mac(self._secret, "server"))

    def _raise_refusal(self, header: dict[str, Any]) -> None:
        """Say in our words what a service says: it has proved nothing yet."""
        reason, where = header.get("refused"), self._dialled
        if reason is None:
            return
        if reason == "busy":
            raise Unavailable(f"the service at {where} has too many connections already: try again later")
        if reason == "secret":
            raise AccessDenied(
                f"the service at {where} says that this client does not know this application's secret; is it of "
                "another application?"
            )
        if reason == "address":
            raise AccessDenied(
                f"the service that {where} leads to is not known by that address: give the address that it has itself, "
                "without a proxy or a port mapping in between; or connections are being passed on to it"
            )
        raise AccessDenied(f"the service at {where} does not let this {self._role} in; see its log")


def no_service(where: str) -> DstlError:
    """Return the error for something that listens and does not speak as we do."""
    return Unavailable(f"what answers at {where} is not a DSTL service: check the address, or try again later")


def socket_address(name: object) -> str:
    """Return an address as ``getsockname`` and ``getpeername`` give it as text that is equal at both ends.

    Of a unix socket, or of anything that is no address of the internet: the empty string.
    """
    if not isinstance(name, tuple) or len(name) < 2:
        return ""
    try:
        host = ipaddress.ip_address(str(name[0]).partition("%")[0])
    except ValueError:
        return ""
    mapped = host.ipv4_mapped if isinstance(host, ipaddress.IPv6Address) else None
    return f"[{mapped or host}]:{name[1]}"


def is_vouched_for(sock: socket.socket) -> bool:
    """True where the kernel says that the other end is a process of this user; False where it says nothing.

    Raises:
        AccessDenied: It is another user's.
    """
    if sock.family != socket.AF_UNIX or not hasattr(socket, "SO_PEERCRED"):
        return False
    credentials = struct.Struct("iII")
    _, uid, _ = credentials.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, credentials.size))
    if uid != os.geteuid():
        raise AccessDenied(f"the process at the other end of a unix socket is of user {uid}, not {os.geteuid()}")
    return True


def _check(expected: bytes, given: object, side: str, who: str) -> None:
    """Compare proofs, whatever was sent as one, in constant time."""
    if not isinstance(given, bytes) or not hmac.compare_digest(expected, given):
        raise Refusal(
            "secret", f"{who}, as {side}, does not know this application's secret; is it of another application?"
        )


def _number(version: object) -> str:
    return str(version) if isinstance(version, int) and 0 <= version < 1 << 16 else "(none)"
