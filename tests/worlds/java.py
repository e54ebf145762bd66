"""Java classes of the tests, compiled against our jar and Spark's."""

import subprocess
from pathlib import Path

from dstl.jvm import build
from dstl.spark import jar_path


def compiled(source: Path, classes: Path) -> str:
    """Compile one source; returns the class path that it was compiled with."""
    path = f"{jar_path()}:{build.spark_jars()}/*"
    command = ["javac", "--release", "17", "-cp", path, "-d", str(classes), str(source)]
    subprocess.run(command, check=True, capture_output=True)
    return path
