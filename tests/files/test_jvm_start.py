"""A JVM starts the coordinator, or says in one line why it cannot; nothing is written before."""

import os
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
from worlds.java import compiled

needs_javac = pytest.mark.skipif(shutil.which("javac") is None, reason="javac is missing: the jar cannot be built")


SOURCE = Path(__file__).with_name("java") / "StartTrial.java"


@pytest.fixture(autouse=True)
def quick_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiler that lives for seconds is ready sooner without the second compiler of its own JVM."""
    monkeypatch.setenv("JAVA_TOOL_OPTIONS", "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC")


@pytest.fixture(scope="module")
def old_jar() -> bytes:
    """The jar of another version, whose sources have no warning."""
    return build.compiled_jar("0.0.7", ["-Xlint:all", "-Werror"])


@pytest.fixture(scope="module")
def trial(tmp_path_factory: pytest.TempPathFactory) -> Path:
    classes = tmp_path_factory.mktemp("classes")
    compiled(SOURCE, classes)
    return classes


def starts(trial: Path, jar: Path | str, place: Path, *interpreters: str | Path) -> list[str]:
    # In the jar, for a package has the version of the jar that its first class comes from.
    both = shutil.copy(jar, place.with_name("with-trial.jar"))
    with zipfile.ZipFile(both, "a") as out:
        for each in trial.rglob("*.class"):
            out.write(each, each.relative_to(trial))
    path = f"{both}:{build.spark_jars()}/*"
    command = ["java", "-cp", path, "dstl.spark.StartTrial", f"dstl://{place}/query/offsets/0", *map(str, interpreters)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert not place.exists()
    return [line for line in done.stdout.splitlines() if line]


@needs_javac
def test_an_interpreter_that_is_none_is_named_with_its_setting_and_a_wrong_secret_refused(
    trial: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bare = tmp_path / "bare-python"
    bare.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S -E "$@"\n')
    chatty = tmp_path / "chatty"
    chatty.write_text("#!/bin/sh\necho welcome to our cluster\n")
    for each in (bare, chatty):
        each.chmod(0o755)
    # Others may have put modules into the directory that the JVM was started in.
    (tmp_path / "uuid.py").write_text("raise SystemExit('planted')")
    monkeypatch.chdir(tmp_path)
    said = starts(trial, jar_path(), tmp_path / "place", "/no/such/python", bare, chatty, sys.executable)
    wrong, (started, refused) = said[:3], said[3:]
    assert all(line.startswith("IOException: ") and "spark.dstl.python" in line for line in wrong), said
    assert ["/no/such/python" in said[0], "bare-python" in said[1], "chatty" in said[2]] == [True] * 3
    # The last one starts, and is then asked with the secret of another application.
    assert started == "started"
    assert "refuses this JVM (secret)" in refused


@needs_javac
def test_a_driver_whose_name_is_no_address_of_its_host_listens_where_spark_binds_or_is_told(
    trial: Path, tmp_path: Path
) -> None:
    """As in a container behind a network address translation; and an option that there is not is said as such."""
    tries = (
        ("spark.driver.host=192.0.2.1",),
        ("spark.driver.bindAddress=127.0.0.1",),
        ("spark.driver.bindAddress=192.0.2.1", "spark.master=local-cluster[1,1,1024]"),
        ("spark.master=local[2]",),
        ("spark.dstl.durabilty=task",),
    )
    said = starts(trial, jar_path(), tmp_path / "place", *(each for one in tries for each in (*one, sys.executable)))
    lines = [line for line in said if "(secret)" not in line]
    assert [line == "started" for line in lines] == [False, True, False, True, False], said
    for line in (lines[0], lines[2]):
        assert "cannot listen at 192.0.2.1" in line
        assert "spark.driver.bindAddress" in line
    assert "spark.dstl.durabilty is not an option" in lines[4]
    assert "did you mean durability?" in lines[4]


@needs_javac
def test_a_jar_of_another_version_is_refused_by_the_python_that_it_starts(
    trial: Path, old_jar: bytes, tmp_path: Path
) -> None:
    (tmp_path / "old.jar").write_bytes(old_jar)
    (said,) = starts(trial, tmp_path / "old.jar", tmp_path / "place", sys.executable)
    assert "jar of dstl-pyspark 0.0.7" in said
    assert "jar_path()" in said


@needs_javac
def test_equal_sources_give_equal_bytes_without_a_warning_and_the_version_is_in_it(old_jar: bytes) -> None:
    assert build.compiled_jar("0.0.7") == old_jar
    with zipfile.ZipFile(BytesIO(old_jar)) as jar:
        names = jar.namelist()
        assert "Implementation-Version: 0.0.7" in jar.read("META-INF/MANIFEST.MF").decode()
    assert {"dstl/spark/DstlPlugin.class", "dstl/fs/DstlFileSystem.class", "dstl/fs/DstlFs.class"} <= set(names)


@needs_javac
def test_the_first_use_of_an_installation_compiles_its_jar_once_whoever_calls_it(tmp_path: Path) -> None:
    # As from a wheel: sources without a jar, in a directory that may be written to, asked by two at once.
    with ThreadPoolExecutor(2) as pool:
        first, other = pool.map(build.kept_jar, [tmp_path] * 2)
    assert {first, other} == {*tmp_path.iterdir()}
    assert zipfile.ZipFile(first).testzip() is None
    before = first.stat()
    assert build.kept_jar(tmp_path) == first
    assert first.stat() == before


@needs_javac
def test_an_installation_that_may_not_be_written_to_keeps_its_jar_in_the_user_s_own_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also: one in a zip, as ``spark-submit --py-files`` brings it, compiles the same jar."""
    root = Path(build.__file__).parents[2]
    with zipfile.ZipFile(tmp_path / "dstl.zip", "w") as whole:
        for package in ("dstl", "handles", "materializer"):
            for each in (root / package).rglob("*"):
                if each.suffix in (".py", ".java"):
                    whole.write(each, each.relative_to(root))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    # The compiler of JAVA_HOME is taken though there is none on the search path.
    compiler = Path(shutil.which("javac") or "").resolve()
    environment = os.environ | {"PATH": "/nowhere", "JAVA_HOME": str(compiler.parents[1])}
    code = f"import sys; sys.path.insert(0, {str(tmp_path / 'dstl.zip')!r}); from dstl.jvm import build as b"
    command = [sys.executable, "-c", f"{code}; print(b.kept_jar())"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    jar = Path(done.stdout.strip())
    assert jar.parent == tmp_path / "caches" / "dstl", done.stderr
    assert jar.parent.stat().st_mode & 0o777 == 0o700
    assert jar.read_bytes() == build.kept_jar().read_bytes()
    monkeypatch.setenv("PATH", "/nowhere")
    # To root every directory is writable but those of such file systems.
    assert build.kept_jar(Path("/sys")) == jar, "the second use needs no compiler"
    jar.parent.chmod(0o777)
    with pytest.raises(Invalid, match=r"mode 0700.*XDG_CACHE_HOME"):
        build.kept_jar(Path("/sys"))


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


def test_every_source_is_formatted_alike() -> None:
    for source in build.SOURCES.rglob("*.java"):
        lines = source.read_text().splitlines()
        assert all(len(each) <= 120 and each == each.rstrip() and "\t" not in each for each in lines), source
        code = [each for each in lines if each.strip() and not each.lstrip().startswith("*")]
        indents = [len(each) - len(each.lstrip()) for each in code]
        assert all(each % 2 == 0 for each in indents), source
        imports = [each for each in lines if each.startswith("import ")]
        assert imports == sorted(imports), source
