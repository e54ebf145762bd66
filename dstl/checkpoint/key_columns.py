"""An operator finds its state again by its name and by the names of its key columns: types alone would let it take
another operator's."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from dstl.errors import Invalid
from handles.checkpoint import OperatorEntry

__all__ = ["check_key_columns"]


def check_key_columns(declared: Mapping[str, Sequence[str]], stored: Mapping[str, OperatorEntry]) -> None:
    """Refuse an operator that groups by other columns than its checkpoint does.

    Upper and lower case count as the same, as they do to Spark.

    Args:
        declared: The key columns of the query's operators, by operator.
        stored: The operators of the checkpoint, by name.

    Raises:
        Invalid: Says who groups by what, and what to do.
    """
    held = {uid: _key_columns(entry) for uid, entry in stored.items()}
    for uid, wanted in declared.items():
        found = held.get(uid, ())
        if not wanted or not found or _fold_case(wanted) == _fold_case(found):
            continue
        owners = [other for other, columns in held.items() if _fold_case(columns) == _fold_case(wanted)]
        elsewhere = f"; operator {owners[0]!r} of the checkpoint groups by ({', '.join(wanted)})" if owners else ""
        renaming = "".join(
            f".withColumnRenamed({new!r}, {old!r})"
            for old, new in zip(found, wanted, strict=False)
            if old.casefold() != new.casefold()
        )
        raise Invalid(
            f"operator {uid!r} groups by ({', '.join(wanted)}), but its checkpoint by ({', '.join(found)}){elsewhere}. "
            "If operators have changed places, pass each the name= under which its state is stored; if this is "
            "another operator, give it a name of its own; if a column was renamed, group by the old name: "
            f"df{renaming}"
        )


def _key_columns(entry: OperatorEntry) -> tuple[str, ...]:
    try:
        return tuple(str(field["name"]) for field in json.loads(entry.registry["key"])["fields"])
    except (KeyError, TypeError, ValueError):
        # It has no state yet, or is damaged: who reads the registry says so.
        return ()


def _fold_case(names: Sequence[str]) -> list[str]:
    return [name.casefold() for name in names]
