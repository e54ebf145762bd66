"""The jar that gives Spark ``dstl://``, and its way into a driver's JVM: no session has to be prepared for it."""

from __future__ import annotations

import weakref
from typing import Any

from py4j.java_gateway import is_instance_of  # type: ignore[import-untyped]
from py4j.protocol import Py4JJavaError  # type: ignore[import-untyped]
from pyspark.sql import SparkSession

from dstl.files.namespace import SCHEME
from dstl.jvm.build import check_version, kept_jar

_ROOTS = "dstl.fs.OwnedRoots"
_MUTABLE = "org.apache.spark.util.MutableURLClassLoader"

_made: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
"""The class loader of a JVM that had none to add to, by py4j's gateway: a later SparkContext shares it."""


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


def driver_roots(session: SparkSession) -> Any:
    """Return the roots that the driver's JVM knows (``dstl.fs.OwnedRoots``), and let Hadoop find ``dstl://`` there.

    The jar joins the class loader that ``spark-submit`` has made for ``spark.jars``, and every JVM that PySpark starts
    has that one: so it is loaded once in the JVM, for all sessions and backends, and tasks of a local session see it
    too. In a JVM that was started in another way the SparkContext's Hadoop configuration gets a class loader for it.
    py4j's class loading stays as it is. Executors of a cluster get nothing.

    Args:
        session: A session of the driver.

    Raises:
        Invalid: The JVM has the jar of another version, or there is no jar and none can be built.
    """
    context = session.sparkContext
    jvm: Any = session._jvm
    configuration = context._jsc.hadoopConfiguration()
    if context._gateway in _made:
        configuration.setClassLoader(_made[context._gateway])
    loader = configuration.getClassLoader()
    if (found := _loaded(loader)) is None:
        url = jvm.java.io.File(jar_path()).toURI().toURL()
        mutable = loader
        while mutable is not None and not is_instance_of(context._gateway, mutable, _MUTABLE):
            mutable = mutable.getParent()
        if mutable is None:
            loader = mutable = jvm.org.apache.spark.util.MutableURLClassLoader(
                context._gateway.new_array(jvm.java.net.URL, 0), loader
            )
            configuration.setClassLoader(loader)
            _made[context._gateway] = loader
        mutable.addURL(url)
        found = loader.loadClass(_ROOTS)
    roots = found.newInstance()
    check_version(str(roots.version()))
    configuration.set(f"fs.{SCHEME}.impl", "dstl.fs.DstlFileSystem")
    configuration.set(f"fs.AbstractFileSystem.{SCHEME}.impl", "dstl.fs.DstlFs")
    # Each instance reads the run of its query from its own configuration.
    configuration.setBoolean(f"fs.{SCHEME}.impl.disable.cache", True)
    return roots


def _loaded(loader: Any) -> Any:
    """Return the class as this loader finds it; None where it does not."""
    try:
        return loader.loadClass(_ROOTS)
    except Py4JJavaError as error:
        if error.java_exception.getClass().getSimpleName() != "ClassNotFoundException":
            raise
        return None
