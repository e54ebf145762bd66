"""The wheel holds what it must and nothing else: the flat layout hides mistakes that only a wheel shows."""

import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def test_the_wheel_has_the_three_packages_typed_and_nothing_else(tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(tmp_path), str(ROOT)],
        check=True,
        capture_output=True,
    )
    (wheel,) = tmp_path.glob("*.whl")  # made of the sdist, as a release's is
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names if ".dist-info" not in name}
    assert tops == {"dstl", "handles", "materializer"}
    for package in tops:
        assert f"{package}/py.typed" in names
    unwanted = ("DESIGN", "__pycache__", ".jar")
    assert not [name for name in names if any(each in name for each in unwanted) or name.startswith("dstl/docs/")]
    # An installation compiles its jar of these, as a checkout does: where wheels are built is no JDK, and no PySpark.
    sources = {str(path.relative_to(ROOT)) for path in (ROOT / "dstl" / "jvm" / "java").rglob("*.java")}
    assert len(sources) > 10
    assert sources <= set(names)
    with tarfile.open(next(tmp_path.glob("*.tar.gz"))) as sdist:
        assert sources <= {name.partition("/")[2] for name in sdist.getnames()}
    outside = subprocess.run(
        [sys.executable, "-I", "-c", f"import sys; sys.path.insert(0, {str(wheel)!r}); import handles, dstl.errors"],
        cwd=tmp_path,
        check=False,
        capture_output=True,
        text=True,
    )
    assert outside.returncode == 0, outside.stderr


def test_the_top_level_is_the_designs() -> None:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, check=False, capture_output=True, text=True)
    tops = {name.split("/")[0] for name in listed.stdout.split() if not name.startswith(".")}
    allowed = {"pyproject.toml", "dstl", "materializer", "handles", "tests", "bench", "docker-compose.yml", "README.md"}
    assert tops <= allowed | {"LICENSE", "CHANGELOG.md", "examples"}


def test_no_workflow_takes_an_action_by_a_name_that_can_move() -> None:
    used = [line for path in (ROOT / ".github" / "workflows").glob("*.yml") for line in path.read_text().splitlines()]
    actions = [line for line in used if re.match(r"\s*(- )?uses:", line)]
    assert len(actions) > 5
    assert not [line for line in actions if not re.search(r"@[0-9a-f]{40}  # v\d", line)]


def test_a_release_is_that_of_its_tag_and_has_a_section_in_the_changelog(tmp_path: Path) -> None:
    (tmp_path / ".ci").mkdir()
    shutil.copy(ROOT / ".ci" / "release", tmp_path / ".ci")
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    (tmp_path / "CHANGELOG.md").write_text("## [Unreleased]\n\n- Much.\n")
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    for tag, said in (
        ("v9.9.9", f"the tag is v9.9.9, and pyproject.toml has {version}"),
        (f"v{version}", "no section"),
    ):
        done = subprocess.run([tmp_path / ".ci" / "release", tag], check=False, capture_output=True, text=True)
        assert done.returncode == 1
        assert said in done.stderr


def test_no_configuration_names_a_package_index() -> None:
    for path in (ROOT / "pyproject.toml", ROOT / ".ci" / "run"):
        text = path.read_text()
        assert "index-url" not in text
        assert "index_url" not in text


@pytest.mark.parametrize("name", ["handles", "materializer"])
def test_a_foreign_package_in_the_place_of_ours_is_named_with_what_brought_it(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    (tmp_path / name / "__init__.py").write_text('"""Not ours."""\n')
    about = tmp_path / f"{name}_toolkit-0.1.1.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}-toolkit\nVersion: 0.1.1\n")
    (about / "top_level.txt").write_text(name)
    code = f"import sys; sys.path[:0] = [{str(tmp_path)!r}, {str(ROOT)!r}]; import dstl.spark"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=False, capture_output=True, text=True)
    last = done.stderr.splitlines()[-1]
    assert last.startswith(f"dstl.errors.Invalid: the package {name!r} ({tmp_path / name}) is not that of dstl-pyspark")
    assert f"of {name}-toolkit 0.1.1: uninstall that" in last
