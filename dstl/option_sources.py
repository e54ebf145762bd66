"""Where options come from: keyword arguments first, then the environment, then Spark's configuration, then defaults.

``spark.dstl.batching.persist_delay_s`` and ``DSTL_BATCHING_PERSIST_DELAY_S`` are the option ``persist_delay_s`` of the
section ``batching``. A name that is no option of its section is an error, so that a misspelt one is noticed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from dstl.errors import Invalid

__all__ = ["resolve"]

_Options = TypeVar("_Options", bound=BaseModel)


def resolve(
    section: str,
    kind: type[_Options],
    given: _Options | None,
    environment: Mapping[str, str],
    spark_conf: Mapping[str, str],
) -> _Options:
    """Return a section's options.

    Args:
        section: ``batching``, ``upload``, ``hedging``, ``checkpoints``, ``s3``, ...
        kind: The section's class.
        given: The keyword argument; where it is given, nothing else counts.
        environment: The process's environment.
        spark_conf: Spark's configuration.

    Raises:
        Invalid: A value is out of range or of the wrong type, or a name is no option; says where it was set.
    """
    if given is not None:
        return given
    values: dict[str, str] = {}
    origin: dict[str, str] = {}
    for prefix, source, lower in (
        (f"spark.dstl.{section}.", spark_conf, False),
        (f"DSTL_{section.upper()}_", environment, True),
    ):
        for name, value in source.items():
            if name.startswith(prefix):
                option = name.removeprefix(prefix)
                option = option.lower() if lower else option
                values[option], origin[option] = value, name
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        option = str(first["loc"][0])
        known = ", ".join(kind.model_fields)
        raise Invalid(f"{origin.get(option, option)}: {first['msg'].lower()}; {section} has {known}") from None
