"""File processes as Spark's plugin starts them: told what to be on a pipe, and saying where they listen."""

import base64
import os
import signal
import subprocess
import sys
from typing import Any

import msgpack

from dstl.jvm.build import own_version

SECRET = b"an application's secret of 32 by"


def line(**changed: Any) -> bytes:
    told = {"member_id": "", "coordinator": None, "version": own_version(), "secret": SECRET, "host": "127.0.0.1"}
    return base64.b64encode(msgpack.packb(told | {"bind": "127.0.0.1", "options": {}} | changed)) + b"\n"


def started(first: bytes) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        [sys.executable, "-m", "dstl.process"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdin is not None
    process.stdin.write(first)
    process.stdin.flush()
    return process


def said(process: subprocess.Popen[bytes]) -> dict[str, Any]:
    assert process.stdout is not None
    told: dict[str, Any] = msgpack.unpackb(base64.b64decode(process.stdout.readline()))
    return told


def hang(process: subprocess.Popen[bytes]) -> None:
    """Stop all its threads, and return when they stand: until then one of them may still answer."""
    process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED)
