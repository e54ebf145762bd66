"""The wheel holds what it must and nothing else: the flat layout hides mistakes that only a wheel shows."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_the_wheel_has_the_three_packages_typed_and_nothing_else(tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path), str(ROOT)],
        check=True,
        capture_output=True,
    )
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names if ".dist-info" not in name}
    assert tops == {"dstl", "handles", "materializer"}
    for package in tops:
        assert f"{package}/py.typed" in names
    unwanted = ("DESIGN", "__pycache__", ".java")
    assert not [name for name in names if any(each in name for each in unwanted) or name.startswith("dstl/docs/")]
    if shutil.which("javac") is not None:
        assert "dstl/jvm/dstl-jvm.jar" in names
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


def test_no_configuration_names_a_package_index() -> None:
    for path in (ROOT / "pyproject.toml", ROOT / ".ci" / "run"):
        text = path.read_text()
        assert "index-url" not in text
        assert "index_url" not in text
