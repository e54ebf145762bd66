"""DDL text by Spark's own parser, which only the driver has."""

from __future__ import annotations

from pyspark.sql.types import DataType, StructType

from dstl.errors import Invalid, brief, clip


def parse_ddl(text: str) -> StructType:
    """Return the schema of a text such as ``"name string, n long not null"``; a lone ``struct<...>`` is taken as well.

    Raises:
        Invalid: Spark does not take it, or it is one type without a name.
    """
    wrong = f"not a schema that Spark can read: {brief(text)}; write it as 'page string, n long', or give a StructType"
    try:
        found = DataType.fromDDL(text)
    except Exception as error:
        # Any kind: text nested very deep does not even come back as a ParseException.
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise Invalid(f"{wrong} ({clip(reason)})") from None
    if not isinstance(found, StructType):
        raise Invalid(wrong)
    return found
