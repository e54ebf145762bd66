"""Checked schemas of a checkpoint: Spark's JSON of plain SQL types, read here before Spark's own parser sees it.

Spark's parser imports the module that a user-defined type names, and before 4.1.2 unpickled a class out of it. Whoever
can write to the bucket, or hands a savepoint over, could so run code in whoever reads it. Here a stored schema is plain
data until every type in it is known to be one of SQL's own.
"""

from __future__ import annotations

import json
import re
from functools import lru_cache
from typing import Any

from pyspark.sql.types import ArrayType, DataType, MapType, StructField, StructType, UserDefinedType

from dstl.errors import CorruptData, Invalid, brief, clip

MAX_DEPTH = 64
"""Types nest no deeper, in arrays, maps and structs."""

_MAX_JSON_DEPTH = 4 * MAX_DEPTH
_MAX_DIGITS = 38  # Spark's own limit of a decimal

_PLAIN = re.compile(
    r"""
    boolean | byte | short | integer | long | float | double | decimal | string | binary | date | void | variant
    | timestamp | timestamp_ntz | timestamp_ltz | interval | time\([0-9]\)
    | decimal\([ ]*(?P<precision>[0-9]{1,2})[ ]*,[ ]*(?P<scale>-?[0-9]{1,2})[ ]*\)
    | (?:char|varchar)\([ ]*[0-9]{1,10}[ ]*\)
    | string[ ]collate[ ][A-Za-z0-9_]{1,100}
    | interval[ ](?:day|hour|minute|second)(?:[ ]to[ ](?:hour|minute|second))?
    | interval[ ](?:year|month)(?:[ ]to[ ]month)?
    """,
    re.VERBOSE,
)


def schema_to_json(schema: StructType) -> str:
    """Return a schema for a checkpoint: a user-defined type is stored as the SQL type that its values are kept in.

    Raises:
        Invalid: It holds a type that would not be read back.
    """
    try:
        text: str = plain_schema(schema).json()
        schema_from_json(text, "the schema")
    except (CorruptData, RecursionError) as error:
        raise Invalid(f"a schema cannot be stored: {clip(error)}") from None
    return text


@lru_cache(maxsize=256)
def schema_from_json(text: str, what: str) -> StructType:
    """Return a schema that a checkpoint holds; the inverse of :func:`schema_to_json`.

    The same text is the same object, for every task asks for the same few; it must not be changed.

    Args:
        text: Spark's JSON of a struct type, from a place that others may have written to.
        what: Named in errors, such as ``the schema of state 'total'``.

    Raises:
        CorruptData: Not the schema of plain SQL types that a checkpoint of ours holds.
    """
    try:
        data = json.loads(text)
        _check_json_depth(data, what)
        _check(data, what)
        if data["type"] != "struct":
            raise _refusal(what, f"it is the type {brief(data['type'])}, not a struct")
        return StructType.fromJson(data)
    except CorruptData:
        raise
    except RecursionError:
        raise _refusal(what, f"its types are nested more than {MAX_DEPTH} deep") from None
    except Exception as error:
        # What is plain enough for us and still not for Spark, such as an interval from second to day.
        raise _refusal(what, f"{type(error).__name__}: {brief(str(error))}") from error


def plain_schema(schema: StructType) -> StructType:
    """Return a schema with the SQL type of its values in the place of each user-defined type, at any depth."""
    return StructType([StructField(f.name, _plain(f.dataType), f.nullable, f.metadata) for f in schema.fields])


def with_user_types(stored: StructType, declared: StructType) -> StructType:
    """Return a stored schema with the user-defined types of the declared one, where their columns are the same."""
    types = {f.name: f.dataType for f in declared.fields}

    def with_type(field: StructField) -> StructField:
        wanted = types.get(field.name)
        if wanted is None or _plain(wanted).simpleString() != field.dataType.simpleString():
            return field
        return StructField(field.name, wanted, field.nullable, field.metadata)

    return stored if plain_schema(declared) == declared else StructType([with_type(f) for f in stored.fields])


def _plain(data_type: DataType) -> DataType:
    if isinstance(data_type, UserDefinedType):
        return _plain(data_type.sqlType())
    if isinstance(data_type, ArrayType):
        return ArrayType(_plain(data_type.elementType), data_type.containsNull)
    if isinstance(data_type, MapType):
        return MapType(_plain(data_type.keyType), _plain(data_type.valueType), data_type.valueContainsNull)
    return plain_schema(data_type) if isinstance(data_type, StructType) else data_type


def _check(data: Any, what: str) -> None:
    """Refuse whatever is not a plain SQL type. Without recursion: the depth is the writer's choice."""
    waiting: list[tuple[Any, int]] = [(data, 0)]
    while waiting:
        one, depth = waiting.pop()
        if depth > MAX_DEPTH:
            raise _refusal(what, f"its types are nested more than {MAX_DEPTH} deep")
        if isinstance(one, str):
            _check_name(one, what)
            continue
        kind = one.get("type") if isinstance(one, dict) else None
        if kind == "struct" and isinstance(one.get("fields"), list):
            for field in one["fields"]:
                waiting.append((_field_type(field, what), depth + 1))
        elif kind == "array" and isinstance(one.get("containsNull"), bool):
            waiting.append((one.get("elementType"), depth + 1))
        elif kind == "map" and isinstance(one.get("valueContainsNull"), bool):
            waiting += [(one.get("keyType"), depth + 1), (one.get("valueType"), depth + 1)]
        else:
            raise _refusal(what, f"it holds the type {brief(kind if isinstance(kind, str) else one)}")


def _check_name(name: str, what: str) -> None:
    found = _PLAIN.fullmatch(name)
    if found is None or (
        found["precision"] is not None
        and not (1 <= int(found["precision"]) <= _MAX_DIGITS and abs(int(found["scale"])) <= _MAX_DIGITS)
    ):
        raise _refusal(what, f"it holds the type {brief(name)}")


def _field_type(field: Any, what: str) -> Any:
    if (
        not isinstance(field, dict)
        or not isinstance(field.get("name"), str)
        or not isinstance(field.get("nullable", True), bool)
        or not isinstance(field.get("metadata", {}), (dict, type(None)))
    ):
        raise _refusal(what, f"it has the field {brief(field)}")
    return field.get("type")


def _check_json_depth(data: Any, what: str) -> None:
    """Refuse what Python could not walk by recursion later, a field's metadata included."""
    level = [data]
    for _ in range(_MAX_JSON_DEPTH):
        level = [
            inner
            for one in level
            if isinstance(one, (dict, list))
            for inner in (one.values() if isinstance(one, dict) else one)
        ]
        if not level:
            return
    raise _refusal(what, f"its types are nested more than {MAX_DEPTH} deep")


def _refusal(what: str, why: str) -> CorruptData:
    return CorruptData(
        f"{what} is not one that DSTL has stored: {why}. Only plain SQL types are read from a checkpoint; use one that "
        "you trust, or the version of DSTL that wrote it"
    )
