"""The grammar of operators' names, which come back from manifests and become directories."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import Field

__all__ = ["OperatorUid", "is_operator_uid"]

_GRAMMAR = r"[A-Za-z0-9_\-]{1,64}"

OperatorUid = Annotated[str, Field(pattern=f"^{_GRAMMAR}$")]
"""An operator's uid: one path element of letters, digits, ``-`` and ``_``, at most 64."""


def is_operator_uid(text: object) -> bool:
    """Return whether this is a name that an operator may have."""
    return isinstance(text, str) and re.fullmatch(_GRAMMAR, text) is not None
