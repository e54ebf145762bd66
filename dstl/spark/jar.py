"""The jar that gives Spark the ``dstl://`` file system."""

from __future__ import annotations

from dstl.errors import Invalid
from dstl.jvm.build import JAR, JarNotBuilt, build_jar, is_stale

__all__ = ["jar_path"]


def jar_path() -> str:
    """Return the path of the jar, for ``spark.jars``; a checkout builds it first where it has changed.

    Set ``spark.plugins`` to ``dstl.spark.DstlPlugin`` beside it, both before the session is made, and give queries a
    ``checkpointLocation`` of ``dstl://bucket/path``.

    Raises:
        Invalid: There is no jar, and none can be built; says what is missing.
    """
    if is_stale():
        try:
            build_jar()
        except JarNotBuilt as error:
            if not JAR.exists():
                raise Invalid(str(error)) from None
            raise Invalid(f"the jar of dstl:// is older than its sources: {error}") from None
    if not JAR.exists():
        raise Invalid("this installation of dstl-pyspark came without its jar: install a wheel that has it")
    return str(JAR)
