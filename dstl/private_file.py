"""Files that hold a secret or a key, and directories that one user alone may write to."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

from dstl.errors import Invalid

__all__ = ["make_private_directory", "read_private_file"]


def read_private_file(path: str, what: str) -> str:
    """Return the text of a file that its owner alone may read.

    Args:
        path: The file.
        what: What it holds, for messages.

    Raises:
        Invalid: It cannot be read, others than its owner may, or it is not text.
    """
    try:
        with open(path, encoding="utf-8") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
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
            that others may write to, somebody else may have made it.
    """
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    info = path.lstat()
    if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.geteuid() or info.st_mode & 0o077:
        raise PermissionError(errno.EPERM, f"{path} must be a directory of this user's own, mode 0700")
