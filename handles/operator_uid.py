"""The names of operators. Workers import this module, so nothing here may need pydantic."""

from __future__ import annotations

import re

GRAMMAR = r"[A-Za-z0-9_\-]{1,64}"
"""Of an operator's uid: one path element of letters, digits, ``-`` and ``_``, at most 64."""


def is_operator_uid(text: object) -> bool:
    """Return whether this is a name that an operator may have."""
    return isinstance(text, str) and re.fullmatch(GRAMMAR, text) is not None
