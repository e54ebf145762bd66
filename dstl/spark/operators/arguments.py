"""Checks of arguments at the call, so that no task and no library has to refuse them later."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Collection
from difflib import get_close_matches
from typing import Any, Literal, ParamSpec, TypeVar

from pyspark import cloudpickle
from pyspark.sql import DataFrame
from pyspark.sql.types import DataType, StructType

from dstl.errors import Invalid, brief, clip
from handles.operator_uid import is_operator_uid

OutputModeName = Literal["append", "update", "complete", "Append", "Update", "Complete"]
"""What users write, for type checkers: any case is taken, and these are PySpark's."""

P = ParamSpec("P")
T = TypeVar("T", bound=str)


def count_within(name: str, value: Any, highest: int, why: str = "") -> int:
    """Return a whole number in ``[1, highest]``; numpy's count as Python's, True and 4.0 are none.

    Args:
        name: The argument, for the message.
        value: What was given.
        highest: The largest that can be.
        why: What the largest is, for the message.

    Raises:
        Invalid: Another type, or out of range.
    """
    if isinstance(value, bool) or not hasattr(type(value), "__index__"):
        raise Invalid(f"{name}={brief(value)} is not a whole number but {type(value).__name__}")
    found = operator.index(value)
    if not 1 <= found <= highest:
        raise Invalid(f"{name}={found} is not in [1, {highest}]{', ' if why else ''}{why}")
    return found


def choice(name: str, value: Any, choices: Collection[T]) -> T:
    """Return the value if it is one of the choices.

    Raises:
        Invalid: It is not; names them, and the one that was perhaps meant.
    """
    found = next((each for each in choices if value == each and isinstance(value, str)), None)
    if found is None:
        near = get_close_matches(value, choices, 1) if isinstance(value, str) else []
        meant = f"; did you mean {near[0]!r}?" if near else ""
        raise Invalid(f"{name}={brief(value)} is not one of {', '.join(map(repr, choices))}{meant}")
    return found


def flag(name: str, value: Any) -> bool:
    """Return the value if it is a truth value.

    Raises:
        Invalid: It is something that only counts as one.
    """
    if not isinstance(value, bool):
        raise Invalid(f"{name}={brief(value)} is neither True nor False")
    return value


def time_to_live(what: str, given: Any) -> int:
    """Return the milliseconds of a time to live, 0 for ever.

    Args:
        what: Names the operator, for the message.
        given: What was given; None for ever.

    Raises:
        Invalid: It is no whole number above 0.
    """
    if given is None:
        return 0
    if isinstance(given, bool) or not isinstance(given, int) or given <= 0:
        raise Invalid(f"{what}: ttlDurationMs={brief(given)} is not a number of milliseconds above 0")
    return given


def check_ships(value: object, what: str, where_instead: str) -> None:
    """Refuse what cannot be sent to a worker, which would otherwise be said by pickle, in the middle of a plan.

    Args:
        value: The user's processor or function.
        what: Names it and its operator, for the message.
        where_instead: What to do about it, for the message.

    Raises:
        Invalid: It cannot be pickled.
    """
    try:
        cloudpickle.dumps(value)
    except Exception as error:
        raise Invalid(f"{what} cannot be sent to the workers: {error}; {where_instead}") from error


def check_operator_name(name: object) -> str:
    """Return the name if it can be an operator's: one path element of the grammar of object names.

    Raises:
        Invalid: It cannot.
    """
    if not isinstance(name, str):
        raise Invalid(f"an operator's name is a text, not {type(name).__name__}: name={str(name)[:80]!r}")
    if not is_operator_uid(name):
        raise Invalid(f"not an operator name: {name[:80]!r}; use letters, digits, '-' and '_', at most 64")
    return name


def with_signature_of(of: Callable[P, DataFrame]) -> Callable[[Callable[..., DataFrame]], Callable[P, DataFrame]]:
    """Give a method the signature of another one."""

    def decorate(method: Callable[..., DataFrame]) -> Callable[P, DataFrame]:
        method.__signature__ = inspect.signature(of)  # type: ignore[attr-defined]
        return method

    return decorate


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
