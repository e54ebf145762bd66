"""DSTL: a durable short-term log as the state backend of PySpark Structured Streaming."""

from importlib import import_module

__all__: list[str] = []


def _refuse_foreign(name: str) -> None:
    """Refuse what has the name of one of our packages and is another distribution's: pip lets the two share it.

    Raises:
        Invalid: Names what is there, and the distribution that brought it.
    """
    try:
        found = import_module(name)
        if getattr(found, "DISTRIBUTION", None) == "dstl-pyspark":
            return
        place = ", ".join(found.__path__)
    except Exception as error:  # what a foreign package needs may be missing
        place = repr(error)
    from importlib.metadata import packages_distributions, version

    from dstl.errors import Invalid

    others = {*packages_distributions().get(name, ())} - {"dstl-pyspark"}
    brought = " and ".join(f"{other} {version(other)}" for other in sorted(others)) or "no known distribution"
    raise Invalid(
        f"the package {name!r} ({place}) is not that of dstl-pyspark, but of {brought}: uninstall that and install "
        "dstl-pyspark again, or give dstl-pyspark an environment of its own"
    )


for _name in ("handles", "materializer"):
    _refuse_foreign(_name)
