"""The documentation's pages and the README's first program run as they stand."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from worlds.pages import RUNNABLE, follow


@pytest.fixture
def here(spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A working directory of the test, Spark's own included: the JVM keeps the one in which it was started."""
    assert spark._jvm is not None
    files = spark._jvm.org.apache.hadoop.fs.FileSystem.getLocal(spark._jsc.hadoopConfiguration())
    before = files.getWorkingDirectory()
    files.setWorkingDirectory(spark._jvm.org.apache.hadoop.fs.Path(str(tmp_path)))
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    files.setWorkingDirectory(before)


@pytest.mark.parametrize("page", RUNNABLE)
def test_every_program_of_a_page_runs(page: str, here: Path) -> None:
    follow(page)
    if page == "README.md":
        # Nowhere else: a relative path is one of this directory to Spark, too.
        assert {each.name for each in here.iterdir()} == {"clicks", "state"}
