"""A JVM starts the coordinator, or says in one line why it cannot; nothing is written before."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from dstl.jvm import build
from dstl.spark import jar_path
from worlds.java import compiled

pytestmark = pytest.mark.skipif(shutil.which("javac") is None, reason="javac is missing: the jar cannot be built")

SOURCE = Path(__file__).with_name("java") / "StartTrial.java"


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


def test_a_jar_of_another_version_is_refused_by_the_python_that_it_starts(trial: Path, tmp_path: Path) -> None:
    (tmp_path / "old.jar").write_bytes(build.compiled_jar("0.0.7"))
    (said,) = starts(trial, tmp_path / "old.jar", tmp_path / "place", sys.executable)
    assert "jar of dstl-pyspark 0.0.7" in said
    assert "jar_path()" in said
