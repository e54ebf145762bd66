"""The facts with which a process becomes a coordinator of files or a host's file service, and its answer.

Both are one line: base64 of msgpack, on standard input and output. They hold the secret: for a pipe, never for a log.
"""

from __future__ import annotations

import base64
import binascii
from dataclasses import dataclass, field
from typing import Any

import msgpack

from dstl.errors import Invalid
from dstl.jvm.build import own_version
from dstl.rpc.client import Address
from dstl.rpc.protocol import PROTOCOL_VERSION, Secret

__all__ = ["FileInvitation", "answer_line", "check_version"]


@dataclass(frozen=True, kw_only=True)
class FileInvitation:
    """The invitation.

    Attributes:
        kind: ``coordinator`` or ``host``.
        version: Of the jar; empty where it is not known.
        secret: The application's.
        host: This host as Spark names it.
        bind: Address of this host at which it listens for others; None for ``host``, empty where there are none.
        member: The host service's name; empty for a coordinator.
        coordinator: Where a host's service enlists.
        options: Spark's ``spark.dstl.*`` settings.
    """

    kind: str
    version: str
    secret: Secret
    host: str
    bind: str | None = None
    member: str = ""
    coordinator: Address | None = None
    options: dict[str, str] = field(default_factory=dict)

    @staticmethod
    def from_line(line: bytes) -> FileInvitation:
        """Read an invitation.

        Raises:
            Invalid: It is none. What it says is not shown, for it may hold the secret.
        """
        try:
            fields: dict[str, Any] = msgpack.unpackb(base64.b64decode(line.strip(), validate=True), raw=False)
            kind, coordinator = fields["kind"], None
            if kind == "host":
                coordinator = Address(fields["coordinator_host"], int(fields["coordinator_port"]))
            elif kind != "coordinator":
                raise ValueError
            return FileInvitation(
                kind=kind,
                version=str(fields["version"]),
                secret=Secret(fields["secret"]),
                host=str(fields["host"]),
                bind=str(fields["bind"]) if "bind" in fields else None,
                member=str(fields.get("member", "")),
                coordinator=coordinator,
                options={str(name): str(value) for name, value in fields["options"].items()},
            )
        except (ValueError, TypeError, KeyError, AttributeError, binascii.Error, msgpack.exceptions.UnpackException):
            raise Invalid("the first line of standard input is no invitation of Spark's plugin") from None


def answer_line(socket: str, error: str = "") -> bytes:
    """Return what the process says of itself: where it listens, or why it does not."""
    told: dict[str, Any] = {"error": error} if error else {"socket": socket, "protocol": PROTOCOL_VERSION}
    return base64.b64encode(msgpack.packb(told)) + b"\n"


def check_version(jar: str) -> None:
    """Refuse a jar of another version than this package's.

    Raises:
        Invalid: Names both.
    """
    own = own_version()
    if jar and own and jar != own:
        raise Invalid(
            f"this driver's JVM has the jar of dstl-pyspark {jar}, and this Python has {own}: name in spark.jars what "
            "dstl.spark.jar_path() prints (a StateBackend needs nothing there), and have one version on every host"
        )
