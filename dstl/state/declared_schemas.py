"""Schemas as a processor declares them: Spark types, or DDL text that Spark's parser has read on the driver."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pyspark.sql.types import StructType

from dstl.errors import Invalid, brief

__all__ = ["DeclaredSchemas", "ParseDdl"]

ParseDdl = Callable[[str], StructType]
"""Returns the schema of a DDL text; raises Invalid for one that is none."""


class DeclaredSchemas:
    """Reads schemas, and remembers what each DDL text stands for.

    A task has no JVM and so no parser. What it unpickles knows the texts that the driver has read when ``init`` ran
    there. Not thread-safe.

    Args:
        parse: Spark's parser; None for none.
    """

    def __init__(self, parse: ParseDdl | None = None) -> None:
        self._parse = parse
        self._known: dict[str, StructType] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {"_parse": None, "_known": self._known}

    def schema(self, given: StructType | str, what: str) -> StructType:
        """Return the schema that a declaration means.

        Args:
            given: A ``StructType``, or DDL text.
            what: Names the state and which of its schemas it is, for messages.

        Raises:
            Invalid: Neither, text that Spark does not take, or text that the driver has not seen.
        """
        if isinstance(given, StructType):
            return given
        if not isinstance(given, str):
            raise Invalid(f"{what} cannot be used: it is {type(given).__name__}, not a StructType or a DDL string")
        if given not in self._known:
            if self._parse is None:
                raise Invalid(
                    f"{what} cannot be used: init() had no {brief(given)} when the query was defined. Declare every "
                    "state in init(), always with the same text, or give a StructType"
                )
            try:
                self._known[given] = self._parse(given)
            except Invalid as error:
                raise Invalid(f"{what} cannot be used: {error}") from None
        return self._known[given]
