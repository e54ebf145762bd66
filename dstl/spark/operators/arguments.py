"""Checks of arguments at the call, so that no task and no library has to refuse them later."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Collection
from difflib import get_close_matches
from typing import Any, Literal, ParamSpec, TypeVar

from pyspark import cloudpickle
from pyspark.sql import DataFrame

from dstl.errors import Invalid, brief
from handles.operator_uid import is_operator_uid

__all__ = [
    "OutputModeName",
    "check_operator_name",
    "check_ships",
    "choice",
    "column_names",
    "count_within",
    "flag",
    "with_signature_of",
]

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
        raise Invalid(f"{name}={brief(value)} is none of {', '.join(map(repr, choices))}{meant}")
    return found


def flag(name: str, value: Any) -> bool:
    """Return the value if it is a truth value.

    Raises:
        Invalid: It is something that only counts as one.
    """
    if not isinstance(value, bool):
        raise Invalid(f"{name}={brief(value)} is neither True nor False")
    return value


def column_names(by: Any, what: str) -> list[str]:
    """Return the names of grouping columns that were given as one or as a sequence.

    Args:
        by: A name, or a list or tuple of names.
        what: Names the operator, for the message.

    Raises:
        Invalid: Something that is no name.
    """
    if isinstance(by, str):
        return [by]
    if not isinstance(by, (list, tuple)):
        raise Invalid(f"{what}: by={brief(by)} is {type(by).__name__}: give a column's name or a list of names")
    for each in by:
        if not isinstance(each, str):
            raise Invalid(f"{what}: by holds {brief(each)}, which is {type(each).__name__} and not a column's name")
    return list(by)


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
    """Give a method the signature of another one, but for ``style``, which it decides."""

    def decorate(method: Callable[..., DataFrame]) -> Callable[P, DataFrame]:
        signature = inspect.signature(of)
        parameters = [each for name, each in signature.parameters.items() if name != "style"]
        method.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        return method

    return decorate
