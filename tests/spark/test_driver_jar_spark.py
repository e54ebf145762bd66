"""The jar comes into a running session by itself: each row is a way in which a driver's JVM comes to be."""

import json
import os
import struct
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from home import Home

from dstl.errors import Invalid
from dstl.jvm.build import spark_jars
from dstl.spark import jar_path
from worlds.waiting import wait_until

pytestmark = [pytest.mark.spark, pytest.mark.timeout(300)]

JOB = Path(__file__).with_name("jarless_job.py")
JARS = spark_jars() or Path()
SPARK_HOME = JARS.parent
ROOT = Path(__file__).parents[2]

Way = Callable[[Path], list[str]]


def by_python(home: Path) -> list[str]:
    """An operator of Spark's own writes to the directory from tasks, which a local session has in this very JVM."""
    return [sys.executable, str(JOB), "local[2]", "True", "4", str(home)]


def by_spark_submit(home: Path) -> list[str]:
    """The session's master is what ``spark-submit`` was told, and tasks run in processes without the jar."""
    command = [str(SPARK_HOME / "bin" / "spark-submit"), "--master", "local-cluster[2,1,1024]"]
    return [*command, "--conf", "spark.executor.cores=1", str(JOB), "", "False", "1", str(home)]


def by_shell(home: Path) -> list[str]:
    """A notebook's way: the session is there before the user's first line."""
    home.mkdir()
    arguments = [str(JOB), "", "True", "1", str(home)]
    (home / "cell").write_text(f"import sys; sys.argv = {arguments!r}\nexec(open(sys.argv[0]).read())\n")
    return ["sh", "-c", f"'{SPARK_HOME}/bin/pyspark' --master 'local[2]' < '{home}/cell'"]


WAYS: dict[str, Way] = {"python": by_python, "spark-submit, local-cluster": by_spark_submit, "a shell": by_shell}

EXPECTED = {
    "first": [["a", 12], ["b", 1]],
    "restarted": [["a", 13], ["c", 1]],
    "second_backend": [["a", 13], ["b", 1], ["c", 1]],
    "new_context": [["b", 2]],
}


@contextmanager
def foreign_jvm(work: Path) -> Iterator[dict[str, str]]:
    """A JVM that no spark-submit has started, and that has none of its class loaders; yields how Python reaches it."""
    opened = [
        f"--add-opens=java.base/{each}=ALL-UNNAMED" for each in ("java.lang", "java.nio", "java.util", "sun.nio.ch")
    ]
    command = ["java", *opened, "-cp", f"{JARS}/*", "org.apache.spark.api.python.PythonGatewayServer"]
    told = work / "gateway"
    environment = {**os.environ, "_PYSPARK_DRIVER_CONN_INFO_PATH": str(told), "SPARK_TESTING": ""}
    quiet: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, env=environment, **quiet) as jvm:
        try:
            wait_until(lambda: told.exists() or jvm.poll() is not None, "where the JVM listens")
            port, length = struct.unpack(">ii", told.read_bytes()[:8])
            secret = told.read_bytes()[8 : 8 + length].decode()
            yield {"PYSPARK_GATEWAY_PORT": str(port), "PYSPARK_GATEWAY_SECRET": secret}
        finally:
            jvm.kill()


def results(command: list[str], **environment: str) -> dict[str, Any]:
    """Run a driver and return what it told."""
    known = {**os.environ, "PYSPARK_PYTHON": sys.executable, "PYSPARK_DRIVER_PYTHON": sys.executable, **environment}
    known["PYTHONPATH"] = os.pathsep.join(map(str, filter(None, [ROOT, known.get("PYTHONPATH")])))
    done = subprocess.run(command, env=known, capture_output=True, text=True, timeout=280, check=False)
    lines = [line.partition("RESULT ")[2] for line in done.stdout.splitlines() if "RESULT " in line]
    assert lines, done.stdout[-4000:] + done.stderr[-4000:]
    return {name: value for line in lines for name, value in json.loads(line).items()}


@pytest.mark.drawn(1, group="ways")
@pytest.mark.parametrize("way", WAYS)
def test_no_session_is_prepared(way: str, tmp_path: Path) -> None:
    found = results(WAYS[way](tmp_path / "home"))
    # On a cluster the query with an operator of Spark's own is refused before it begins.
    refused = {"refused": True} if "cluster" in way else {}
    assert found == (EXPECTED if way == "python" else {"first": EXPECTED["first"], **refused})


@pytest.mark.drawn(1, group="ways")
def test_no_session_is_prepared_in_a_jvm_that_spark_submit_has_not_started(tmp_path: Path) -> None:
    with foreign_jvm(tmp_path) as gateway:
        command = [sys.executable, str(JOB), "local[2]", "False", "4", str(tmp_path / "home")]
        assert results(command, **gateway) == EXPECTED


def test_a_jar_of_another_version_is_refused_by_name(home: Home) -> None:
    other = home.path / "other.jar"
    with zipfile.ZipFile(jar_path()) as jar, zipfile.ZipFile(other, "w") as changed:
        for each in jar.namelist():
            is_manifest = each == "META-INF/MANIFEST.MF"
            old = b"Manifest-Version: 1.0\nImplementation-Version: 0.0.1\n\n"
            changed.writestr(each, old if is_manifest else jar.read(each))
    jvm: Any = home.spark._jvm
    configuration = home.spark.sparkContext._jsc.hadoopConfiguration()
    urls = home.spark.sparkContext._gateway.new_array(jvm.java.net.URL, 1)
    urls[0] = jvm.java.io.File(str(other)).toURI().toURL()
    own = configuration.getClassLoader()
    configuration.setClassLoader(jvm.java.net.URLClassLoader(urls, jvm.java.lang.ClassLoader.getPlatformClassLoader()))
    try:
        # In a thread of its own: py4j takes two classes of one name for the same, by thread.
        with (
            home.backend() as backend,
            ThreadPoolExecutor(1) as aside,
            pytest.raises(Invalid) as refused,
        ):
            aside.submit(lambda: backend.checkpoint_location).result()
    finally:
        configuration.setClassLoader(own)
    assert str(refused.value).startswith("this driver's JVM has the jar of dstl-pyspark 0.0.1, and this Python has 0.")
    assert not list(home.path.rglob("manifests/*")), "something was written"
