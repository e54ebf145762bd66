"""What the calls of the API are given, checked at the call, so that no task and no library has to say it later."""

from __future__ import annotations

import operator
from collections.abc import Collection
from difflib import get_close_matches
from typing import Any, TypeVar

from pyspark import cloudpickle

from dstl.errors import Invalid

__all__ = ["check_ships", "choice", "column_names", "count_within", "shown"]

_MOST_SHOWN = 80

T = TypeVar("T", bound=str)


def shown(value: object) -> str:
    """Return a value as a message shows it: its start, for it may be megabytes of somebody's data."""
    text = repr(value)
    return text if len(text) <= _MOST_SHOWN else text[:_MOST_SHOWN] + "..."


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
        raise Invalid(f"{name}={shown(value)} is not a whole number but {type(value).__name__}")
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
        raise Invalid(f"{name}={shown(value)} is none of {', '.join(map(repr, choices))}{meant}")
    return found


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
        raise Invalid(f"{what}: by={shown(by)} is {type(by).__name__}: give a column's name or a list of names")
    for each in by:
        if not isinstance(each, str):
            raise Invalid(f"{what}: by holds {shown(each)}, which is {type(each).__name__} and not a column's name")
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
