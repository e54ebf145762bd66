"""The jar for Spark's JVMs: compiled at its first use from the sources beside this file, and kept.

``python -m dstl.jvm.build`` does it ahead of time, where an image is built that is to run without a compiler.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
import zipfile
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from importlib.resources import files
from importlib.resources.abc import Traversable
from io import BytesIO
from pathlib import Path

from dstl.errors import Invalid
from dstl.private_file import make_private_directory

SOURCES = Path(__file__).with_name("java")
_RELEASE = "17"
"""The oldest Java that Spark 4 runs on."""
_NEEDED = (
    "hadoop-client-api-*",
    "spark-core_*",
    "spark-sql-api_*",
    "spark-sql_*",
    "spark-catalyst_*",
    "jsr305-*",
    "jackson-annotations-*",
    "jackson-databind-*",
    "spark-common-utils_*",
    "scala-library-*",
    "slf4j-api-*",
)
_SERVICE = "META-INF/services/org.apache.hadoop.fs.FileSystem"
_EPOCH = (1980, 1, 1, 0, 0, 0)
"""The time of every entry, zip's earliest: equal sources give equal bytes."""


def spark_jars() -> Path:
    """Return the directory of the jars of the Spark that PySpark runs: ``SPARK_HOME``'s, or its own.

    Raises:
        Invalid: There is no PySpark.
    """
    try:
        from pyspark.find_spark_home import _find_spark_home
    except ModuleNotFoundError:
        raise Invalid("the jar is compiled against PySpark's: pip install 'dstl-pyspark[spark]'") from None
    return Path(_find_spark_home()) / "jars"


def own_version() -> str:
    """Return the version of this package; empty where it is not installed."""
    try:
        return version("dstl-pyspark")
    except PackageNotFoundError:
        return ""


def check_version(jar: str) -> None:
    """Refuse a jar of another version than this package's.

    Args:
        jar: Its version; empty where it is not known.

    Raises:
        Invalid: Names both.
    """
    own = own_version()
    if jar and own and jar != own:
        raise Invalid(
            f"this driver's JVM has the jar of dstl-pyspark {jar}, and this Python has {own}: name in spark.jars what "
            "dstl.spark.jar_path() prints (a StateBackend needs nothing there), and have one version on every host"
        )


def kept_jar(package: Path = SOURCES.parent) -> Path:
    """Return the jar of these very sources; the first call compiles it. Any number of processes may do so at once.

    Args:
        package: The directory of this module, where the jar is kept; if it may not be written to, the user's own
            directory of caches takes its place.

    Raises:
        Invalid: It cannot be compiled, or kept nowhere; says what is missing.
    """
    release = own_version()
    jar = package / f"dstl-jvm-{_digest(release)}.jar"
    if jar.is_file():
        return jar
    try:
        if not _takes_files(package):
            cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dstl"
            make_private_directory(cache)
            jar = cache / jar.name
        if not jar.is_file():
            _keep(jar, compiled_jar(release))
    except (OSError, RuntimeError) as error:  # the latter: a user without a home
        raise Invalid(
            f"the jar for Spark's JVM cannot be kept ({error}): set XDG_CACHE_HOME to a directory of your own"
        ) from error
    return jar


def compiled_jar(release: str, options: Sequence[str] = ()) -> bytes:
    """Return the jar, compiled from the sources.

    Args:
        release: The version of DSTL that it says it is.
        options: More options of ``javac``.

    Raises:
        Invalid: There is no compiler, no PySpark, or the sources do not compile.
    """
    compiler = _compiler()
    if compiler is None:
        raise Invalid(
            "javac is missing: DSTL compiles the jar for Spark's JVM at its first use, so install a JDK of Java 17 or "
            "newer (a JRE has no compiler), or run python -m dstl.jvm.build where the environment is made"
        )
    path = os.pathsep.join(str(each) for name in _NEEDED for each in sorted(spark_jars().glob(f"{name}.jar")))
    with tempfile.TemporaryDirectory() as work:
        sources = {Path(work, "java", name): content for name, content in _sources()}
        for each, content in sources.items():
            each.parent.mkdir(parents=True, exist_ok=True)
            each.write_bytes(content)
        classes = Path(work, "classes")
        # It ends before its own optimising compiler would pay: 2.0 s instead of 3.8.
        command = [compiler, "-J-XX:TieredStopAtLevel=1", "--release", _RELEASE, "-encoding", "UTF-8", *options]
        command += ["-cp", path, "-d", str(classes)]
        done = subprocess.run([*command, *map(str, sources)], capture_output=True, text=True, check=False)
        if done.returncode:
            raise Invalid(f"{compiler} does not compile the jar for Spark's JVM:\n{done.stdout}{done.stderr}")
        return _packed(classes, release)


def _sources(place: Traversable | None = None, inside: str = "") -> list[tuple[str, bytes]]:
    """Return the sources by their places, sorted; of a package in a zip (``--py-files``), too."""
    found = []
    for each in sorted((place or files(__package__) / SOURCES.name).iterdir(), key=lambda each: each.name):
        if each.is_dir():
            found += _sources(each, f"{inside}{each.name}/")
        elif each.name.endswith(".java"):
            found.append((f"{inside}{each.name}", each.read_bytes()))
    return found


def _compiler() -> str | None:
    """Return the compiler beside the Java that Spark runs, else that of the search path."""
    home = os.environ.get("JAVA_HOME")
    return (shutil.which("javac", path=f"{home}/bin") if home else None) or shutil.which("javac")


def _digest(release: str) -> str:
    """Return what tells this jar from that of other sources."""
    digest = hashlib.blake2b(release.encode(), digest_size=8)
    for name, content in _sources():
        digest.update(f"\0{name}\0".encode())
        digest.update(content)
    return digest.hexdigest()


def _packed(classes: Path, release: str) -> bytes:
    manifest = f"Manifest-Version: 1.0\nImplementation-Title: dstl-pyspark\nImplementation-Version: {release}\n\n"
    packed = BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as jar:
        jar.writestr(zipfile.ZipInfo("META-INF/MANIFEST.MF", _EPOCH), manifest)
        # Where the plugin was forgotten, the file system is found all the same, and says so.
        jar.writestr(zipfile.ZipInfo(_SERVICE, _EPOCH), "dstl.fs.DstlFileSystem\n")
        for each in sorted(classes.rglob("*.class")):
            jar.writestr(zipfile.ZipInfo(each.relative_to(classes).as_posix(), _EPOCH), each.read_bytes())
    return packed.getvalue()


def _takes_files(directory: Path) -> bool:
    """Return whether files may be made there, by making one: permissions alone do not tell it of every file system."""
    try:
        with tempfile.TemporaryFile(dir=directory):
            return True
    except OSError:
        return False


def _keep(jar: Path, content: bytes) -> None:
    """Write the jar whole or not at all: other processes may read it, and write the same."""
    descriptor, part = tempfile.mkstemp(prefix=f".{jar.name}.", dir=jar.parent)
    try:
        with open(descriptor, "wb") as file:
            file.write(content)
            # Those who may read the package may read its jar.
            os.fchmod(descriptor, 0o644)
            file.flush()
            os.fsync(descriptor)
        os.replace(part, jar)
    except BaseException:
        os.unlink(part)
        raise


if __name__ == "__main__":
    print(kept_jar())
