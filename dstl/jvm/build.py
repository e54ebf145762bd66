"""Compiles the sources below ``java/`` against the jars of an installed PySpark: ``python -m dstl.jvm.build``.

It needs nothing of DSTL and no package, for a wheel's build runs it in an environment of its own.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from pathlib import Path

__all__ = ["JAR", "SOURCES", "JarNotBuilt", "build_jar", "is_stale", "spark_jars"]

JAR = Path(__file__).with_name("dstl-jvm.jar")
SOURCES = Path(__file__).with_name("java")
_PROJECT = Path(__file__).parents[2] / "pyproject.toml"
_RELEASE = "17"
_NEEDED = ("hadoop-client-api-*", "spark-core_*", "spark-common-utils_*", "scala-library-*", "slf4j-api-*")
_SERVICE = "META-INF/services/org.apache.hadoop.fs.FileSystem"
_EPOCH = (1980, 1, 1, 0, 0, 0)


class JarNotBuilt(Exception):
    """The jar cannot be built here; says in one line what is missing."""


def spark_jars() -> Path | None:
    """Return the directory of Spark's jars: ``DSTL_SPARK_JARS``, else that of the installed PySpark; None without."""
    named = os.environ.get("DSTL_SPARK_JARS")
    if named:
        return Path(named)
    found = importlib.util.find_spec("pyspark")
    return Path(found.origin).with_name("jars") if found is not None and found.origin else None


def is_stale() -> bool:
    """Return True where a source is newer than the jar, or there is no jar; False where there are no sources."""
    sources = [*SOURCES.rglob("*.java")]
    if not sources:
        return False
    return not JAR.exists() or max(p.stat().st_mtime for p in sources) > JAR.stat().st_mtime


def build_jar(target: Path = JAR) -> Path:
    """Compile the sources and return the jar.

    Raises:
        JarNotBuilt: There is no ``javac``, no PySpark, or the sources do not compile.
    """
    sources = sorted(map(str, SOURCES.rglob("*.java")))
    compiler, jars = shutil.which("javac"), spark_jars()
    if not sources:
        raise JarNotBuilt(f"the sources of the jar are not in {SOURCES}: install a wheel, or build from a checkout")
    if compiler is None:
        raise JarNotBuilt("javac is missing: install a JDK of Java 17 or newer (dstl:// needs it to build its jar)")
    if jars is None or not jars.is_dir():
        raise JarNotBuilt("PySpark is missing: install it, or name a directory of Spark's jars in DSTL_SPARK_JARS")
    path = os.pathsep.join(str(each) for name in _NEEDED for each in sorted(jars.glob(f"{name}.jar")))
    with tempfile.TemporaryDirectory() as classes:
        command = [compiler, "--release", _RELEASE, "-Xlint:all", "-Werror", "-encoding", "UTF-8"]
        done = subprocess.run(
            [*command, "-cp", path, "-d", classes, *sources], capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise JarNotBuilt(f"the sources of the jar do not compile:\n{done.stdout}{done.stderr}")
        _pack(Path(classes), target)
    return target


def _pack(classes: Path, target: Path) -> None:
    """Write the jar: the same bytes for the same sources, and whole or not at all."""
    version = tomllib.loads(_PROJECT.read_text(encoding="utf-8"))["project"]["version"]
    manifest = f"Manifest-Version: 1.0\nImplementation-Title: dstl-pyspark\nImplementation-Version: {version}\n\n"
    part = target.with_name(f".{target.name}.{os.getpid()}")
    with zipfile.ZipFile(part, "w", zipfile.ZIP_DEFLATED) as jar:
        jar.writestr(zipfile.ZipInfo("META-INF/MANIFEST.MF", _EPOCH), manifest)
        # Where the plugin was forgotten, the file system is found all the same, and says so.
        jar.writestr(zipfile.ZipInfo(_SERVICE, _EPOCH), "dstl.fs.DstlFileSystem\n")
        for each in sorted(classes.rglob("*.class")):
            jar.writestr(zipfile.ZipInfo(each.relative_to(classes).as_posix(), _EPOCH), each.read_bytes())
    part.replace(target)


if __name__ == "__main__":
    try:
        print(build_jar())
    except JarNotBuilt as error:
        sys.exit(str(error))
