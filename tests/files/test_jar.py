"""The jar: built the same twice, without Spark running, and clear where something is missing."""

import shutil
import subprocess
import zipfile
from pathlib import Path

import pytest

from dstl.errors import Invalid
from dstl.jvm import build
from dstl.spark.jar import jar_path

needs_javac = pytest.mark.skipif(shutil.which("javac") is None, reason="javac is missing: the jar cannot be built")


@needs_javac
def test_equal_sources_give_equal_bytes_and_the_version_is_in_it(tmp_path: Path) -> None:
    first, second = build.build_jar(tmp_path / "a.jar"), build.build_jar(tmp_path / "b.jar")
    assert first.read_bytes() == second.read_bytes()
    with zipfile.ZipFile(first) as jar:
        names = jar.namelist()
        assert "Implementation-Version: 0." in jar.read("META-INF/MANIFEST.MF").decode()
    assert {"dstl/spark/DstlPlugin.class", "dstl/fs/DstlFileSystem.class", "dstl/fs/DstlFs.class"} <= set(names)


@needs_javac
def test_a_forgotten_plugin_is_named_by_the_file_system_itself(tmp_path: Path) -> None:
    (tmp_path / "core-site.xml").write_text("<configuration/>")
    jars = build.spark_jars()
    command = [
        "java",
        "-cp",
        f"{tmp_path}:{jar_path()}:{jars}/*",
        "org.apache.hadoop.fs.FsShell",
        "-ls",
        "dstl:///q/offsets",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode != 0
    assert "spark.plugins=dstl.spark.DstlPlugin" in done.stdout + done.stderr


def test_a_clone_without_a_compiler_says_what_is_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(build, "JAR", tmp_path / "none.jar")
    monkeypatch.setattr("dstl.spark.jar.JAR", tmp_path / "none.jar")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(Invalid, match="javac is missing"):
        jar_path()
    monkeypatch.undo()
    if shutil.which("javac") is not None:
        monkeypatch.setenv("DSTL_SPARK_JARS", str(tmp_path / "nowhere"))
        with pytest.raises(build.JarNotBuilt, match="DSTL_SPARK_JARS"):
            build.build_jar(tmp_path / "c.jar")


def test_every_source_is_formatted_alike() -> None:
    for source in build.SOURCES.rglob("*.java"):
        lines = source.read_text().splitlines()
        assert all(len(each) <= 120 and each == each.rstrip() and "\t" not in each for each in lines), source
        code = [each for each in lines if each.strip() and not each.lstrip().startswith("*")]
        indents = [len(each) - len(each.lstrip()) for each in code]
        assert all(each % 2 == 0 for each in indents), source
        imports = [each for each in lines if each.startswith("import ")]
        assert imports == sorted(imports), source
