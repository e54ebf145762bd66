"""Files that hold a secret or a key, and directories that one user alone may write to."""

from __future__ import annotations

import errno
import logging
import math
import os
import stat
from collections import Counter
from pathlib import Path

from dstl.errors import Invalid

_log = logging.getLogger(__name__)
_REFUSED_BITS = 40.0  # what a laptop tries in an afternoon
_WEAK_BITS = 80.0  # out of reach for years
_HOW_TO_MAKE_ONE = "make a random one, with `openssl rand -hex 32`, say"


def read_private_file(path: str, what: str) -> str:
    """Return the text of a file that its owner, this user or root, alone may read.

    Args:
        path: The file.
        what: What it holds, for messages.

    Raises:
        Invalid: It cannot be read, is another user's or no file, others than its owner may read it, or it is not text.
    """
    try:
        # Without waiting: a pipe without a writer would never open.
        with open(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), encoding="utf-8") as file:
            info = os.fstat(file.fileno())
            mode = stat.S_IMODE(info.st_mode)
            if not stat.S_ISREG(info.st_mode):
                raise Invalid(f"the {what} file {path} is not a regular file: write what it should hold into one")
            if info.st_uid not in (os.geteuid(), 0):
                raise Invalid(f"the {what} file {path} is of user {info.st_uid}, who can change it: chown it to yours")
            if mode & 0o077:
                raise Invalid(f"others than its owner may read the {what} file {path} (mode {mode:03o}): chmod 600")
            return file.read()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise Invalid(f"the {what} file {path} cannot be read: {reason}") from None


def make_private_directory(path: Path) -> None:
    """Make a directory with its parents, unless it is there.

    Raises:
        OSError: It cannot be made, or what is there is not this user's own directory with mode 0700: in a directory
            that others may write to, another user may have made it.
    """
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    info = path.lstat()
    if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.geteuid() or info.st_mode & 0o077:
        raise PermissionError(errno.EPERM, f"{path} must be a directory of this user's own, mode 0700")


def check_strength(key: bytes, what: str) -> None:
    """Refuse a key that is easily guessed, and warn of one that is not hard to guess.

    Args:
        key: As people have written it.
        what: What it is, for messages.

    Raises:
        Invalid: It is easily guessed.
    """
    # An upper bound of how many bits are to be guessed, by how the bytes are distributed.
    bits = sum(-count * math.log2(count / len(key)) for count in Counter(key).values())
    if bits < _REFUSED_BITS:
        raise Invalid(f"{what} is easily guessed, for it repeats itself: {_HOW_TO_MAKE_ONE}")
    if bits < _WEAK_BITS:
        _log.warning("%s can be guessed by who has something that was made with it: %s", what, _HOW_TO_MAKE_ONE)
