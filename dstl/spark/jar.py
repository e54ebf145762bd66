"""The jar that gives Spark the ``dstl://`` file system."""

from __future__ import annotations

from dstl.jvm.build import kept_jar

__all__ = ["jar_path"]


def jar_path() -> str:
    """Return the path of the jar, for ``spark.jars``; the first call of an installation compiles it, in seconds.

    It is kept in the package's directory, or where that may not be written to, in ``~/.cache/dstl``
    (``$XDG_CACHE_HOME/dstl``).

    Set ``spark.plugins`` to ``dstl.spark.DstlPlugin`` beside it, both before the session is made, and give queries a
    ``checkpointLocation`` of ``dstl://bucket/path``.

    Raises:
        Invalid: It cannot be compiled (a JDK is missing, say), or kept nowhere; says what is missing.
    """
    return str(kept_jar())
