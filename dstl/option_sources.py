"""Sources of options: keyword arguments first, then the environment, then Spark's configuration, then defaults.

``spark.dstl.batching.segment_size`` and ``DSTL_BATCHING_SEGMENT_SIZE`` are the option ``segment_size`` of the
section ``batching``. A name that is not an option of its section is an error, and so is a section that there is not, so
that a misspelt one is noticed. Of the environment only what is nearly a section, or ends as an option does: a service
that is called dstl-something has Kubernetes put other variables of ours there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from dstl import options
from dstl.errors import Invalid

SECTIONS: dict[str, type[BaseModel]] = {
    "batching": options.BatchingOptions,
    "upload": options.UploadOptions,
    "hedging": options.HedgingOptions,
    "checkpoints": options.CheckpointOptions,
    "materialization": options.MaterializationOptions,
    "rocksdb": options.RocksDBOptions,
    "s3": options.S3Options,
    "sealing": options.SealingOptions,
    "memory": options.MemoryOptions,
    "cluster": options.ClusterOptions,
    "workers": options.WorkerOptions,
    "metrics": options.MetricsOptions,
}
"""Every section of options, by the name that the environment and Spark's configuration have for it."""

_PLAIN = frozenset({"python", "commit", "sources", "durability", "also"})
"""Settings of Spark's plugin and of ``dstl://`` (``dstl/files/options.py``), which are of no section."""
_SPARK, _ENVIRONMENT = "spark.dstl.", "DSTL_"

_Options = TypeVar("_Options", bound=BaseModel)


def check_option_names(environment: Iterable[str], spark_conf: Iterable[str]) -> None:
    """Refuse names of options that there are not, and of sections, which would never be read.

    Args:
        environment: Names of the process's environment.
        spark_conf: Names of Spark's configuration.

    Raises:
        Invalid: Names the first one, and the section that was perhaps meant.
    """
    for name in sorted(spark_conf):
        if name.startswith(_SPARK):
            section, dot, option = name.removeprefix(_SPARK).partition(".")
            if section in _PLAIN and not dot:
                continue
            if section not in SECTIONS:
                raise _no_section(name, section)
            if not option:
                raise Invalid(f"{name} is a section and no option: write {name}.OPTION")
            if option not in SECTIONS[section].model_fields:
                near = get_close_matches(option, SECTIONS[section].model_fields, 1)
                raise Invalid(
                    f"{name} is not an option{f'; did you mean {_SPARK}{section}.{near[0]}?' if near else ''}"
                )
    # Of one word are "host" and "port", with which other programs' variables end as well.
    endings = tuple(f"_{each.upper()}" for kind in SECTIONS.values() for each in kind.model_fields if "_" in each)
    for name in sorted(environment):
        section, _, option = name.removeprefix(_ENVIRONMENT).partition("_")
        foreign = not name.startswith(_ENVIRONMENT) or not option or section.lower() in SECTIONS
        if not foreign and (_nearest(section) or name.endswith(endings)):
            raise _no_section(name, section)


def _nearest(section: str, names: Iterable[str] = SECTIONS) -> list[str]:
    return get_close_matches(section.lower(), list(names), 1, cutoff=0.66)


def _no_section(name: str, section: str) -> Invalid:
    near = _nearest(section, SECTIONS if name.startswith(_ENVIRONMENT) else (*SECTIONS, *sorted(_PLAIN)))
    meant = f"; did you mean {near[0]}?" if near else ""
    return Invalid(f"{name} is not an option: there is no section {section!r}, there are {', '.join(SECTIONS)}{meant}")


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
        Invalid: A value is out of range or of the wrong type, or a name is not an option, and says where it was set; or
            what is given is not of the section's class.
    """
    if given is not None:
        if not isinstance(given, kind):
            raise Invalid(f"{section}= is {type(given).__name__}: give {kind.__name__}(...) of dstl.options")
        return given
    values: dict[str, str] = {}
    origin: dict[str, str] = {}
    for prefix, source, lower in (
        (f"{_SPARK}{section}.", spark_conf, False),
        (f"{_ENVIRONMENT}{section.upper()}_", environment, True),
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
