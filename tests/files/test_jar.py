"""The jar: built the same twice, without Spark running, and clear where something is missing."""

import shutil
import subprocess
import sys
import zipfile
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from pathlib import Path

import pytest

from dstl.errors import Invalid
from dstl.jvm import build
from dstl.spark import jar_path

needs_javac = pytest.mark.skipif(shutil.which("javac") is None, reason="javac is missing: the jar cannot be built")


@needs_javac
def test_equal_sources_give_equal_bytes_without_a_warning_and_the_version_is_in_it() -> None:
    first = build.compiled_jar("0.0.7")
    assert first == build.compiled_jar("0.0.7", ["-Xlint:all", "-Werror"])
    with zipfile.ZipFile(BytesIO(first)) as jar:
        names = jar.namelist()
        assert "Implementation-Version: 0.0.7" in jar.read("META-INF/MANIFEST.MF").decode()
    assert {"dstl/spark/DstlPlugin.class", "dstl/fs/DstlFileSystem.class", "dstl/fs/DstlFs.class"} <= set(names)


@needs_javac
def test_the_first_use_of_an_installation_compiles_its_jar_once_whoever_calls_it(tmp_path: Path) -> None:
    # As from a wheel: sources without a jar, in a directory that may be written to, asked by several at once.
    with ThreadPoolExecutor(3) as pool:
        first, *others = pool.map(build.kept_jar, [tmp_path] * 3)
    assert {first, *others} == {*tmp_path.iterdir()}
    assert zipfile.ZipFile(first).testzip() is None
    before = first.stat()
    assert build.kept_jar(tmp_path) == first
    assert first.stat() == before


@needs_javac
def test_an_installation_that_may_not_be_written_to_keeps_its_jar_in_the_user_s_own_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # To root every directory is writable but those of such file systems.
    package = Path("/sys")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    jar = build.kept_jar(package)
    assert jar.parent == tmp_path / "caches" / "dstl"
    assert jar.parent.stat().st_mode & 0o777 == 0o700
    assert zipfile.ZipFile(jar).testzip() is None
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("JAVA_HOME", raising=False)
    assert build.kept_jar(package) == jar, "the second use needs no compiler"
    jar.parent.chmod(0o777)
    with pytest.raises(Invalid, match=r"mode 0700.*XDG_CACHE_HOME"):
        build.kept_jar(package)


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


def test_where_only_a_jre_is_installed_one_sentence_asks_for_a_jdk(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    with pytest.raises(Invalid, match=r"javac is missing.*install a JDK") as refused:
        build.kept_jar(tmp_path)
    assert "\n" not in str(refused.value)
    assert [*tmp_path.iterdir()] == []


@needs_javac
def test_the_compiler_of_java_home_is_taken_though_none_is_on_the_search_path(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    compiler = Path(shutil.which("javac") or "").resolve()
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("JAVA_HOME", str(compiler.parents[1]))
    assert build.kept_jar(tmp_path).is_file()


@needs_javac
def test_a_package_in_a_zip_compiles_the_same_jar(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As ``spark-submit --py-files`` brings it."""
    root = Path(build.__file__).parents[2]
    with zipfile.ZipFile(tmp_path / "dstl.zip", "w") as whole:
        for package in ("dstl", "handles", "materializer"):
            for each in (root / package).rglob("*"):
                if each.suffix in (".py", ".java"):
                    whole.write(each, each.relative_to(root))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    code = f"import sys; sys.path.insert(0, {str(tmp_path / 'dstl.zip')!r}); from dstl.jvm import build as b"
    done = subprocess.run(
        [sys.executable, "-c", f"{code}; print(b.kept_jar())"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    jar = Path(done.stdout.strip())
    assert jar.parent == tmp_path / "cache" / "dstl", done.stderr
    assert jar.read_bytes() == build.kept_jar().read_bytes()


def test_every_source_is_formatted_alike() -> None:
    for source in build.SOURCES.rglob("*.java"):
        lines = source.read_text().splitlines()
        assert all(len(each) <= 120 and each == each.rstrip() and "\t" not in each for each in lines), source
        code = [each for each in lines if each.strip() and not each.lstrip().startswith("*")]
        indents = [len(each) - len(each.lstrip()) for each in code]
        assert all(each % 2 == 0 for each in indents), source
        imports = [each for each in lines if each.startswith("import ")]
        assert imports == sorted(imports), source
