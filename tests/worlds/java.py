"""Java classes of the tests, compiled against our jar and Spark's."""

import subprocess
from pathlib import Path

from dstl.jvm import build
from dstl.spark import jar_path


def compiled(source: Path, classes: Path) -> str:
    """Compile one source; returns the class path that it was compiled with."""
    path = f"{jar_path()}:{build.spark_jars()}/*"
    # It lives for seconds, and is ready sooner without the second compiler of its own JVM.
    command = ["javac", "-J-XX:TieredStopAtLevel=1", "-J-XX:+UseSerialGC", "--release", "17"]
    command += ["-cp", path, "-d", str(classes), str(source)]
    subprocess.run(command, check=True, capture_output=True)
    return path
