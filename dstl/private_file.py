"""Files that hold a secret or a key."""

from __future__ import annotations

import os
import stat

from dstl.errors import Invalid

__all__ = ["read_private_file"]


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
