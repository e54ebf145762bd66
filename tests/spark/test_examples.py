"""The examples run, and say what their texts promise."""

import importlib
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from home import Home
from pyspark import cloudpickle
from pyspark.sql import SparkSession

from worlds.pages import RUNNABLE, follow

EXAMPLES = Path(__file__).parents[2] / "examples"
SAID = {
    "aggregates": [["s1", 3, 20.0, 18.0, 21.5], ["s2", 1, 3.0, 3.0, 3.0], ["s3", 1, 7.0, 7.0, 7.0]],
    "deduplicate": [["e1", 5], ["e2", 7], ["e3", 9], ["remembered", 3]],
    "event_rules": [
        ["ann", 4, "service before login"],
        ["bob", 1, "service before login"],
        ["bob", 3, "logged in already, at 2"],
    ],
    "means_in_pandas": [["s1", 22.0], ["s2", 5.0]],
    "migrate": [["a", 3], ["c", 1]],
    "on_s3": [[["home", 2], ["shop", 1]], [["home", 3]], [["home", 5], ["shop", 2]]],
    "own_operators": [["home", 3], ["shop", 1]],
    "sessions": [["ann", 1, 0], ["ann", 2, 20], ["bob", 1, 0]],
    "top_products": [["north", "tea 6, jam 5, oil 4"], ["south", "tea 2, jam 1"]],
}


@pytest.mark.parametrize("name", SAID)
def test_an_example_runs_and_says_what_it_promises(name: str, home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)
    module = importlib.import_module(name)
    cloudpickle.register_pickle_by_value(module)  # workers cannot import it
    found = module.main(home.spark, home.path)
    home.spark.conf.unset("spark.sql.streaming.stateStore.providerClass")
    assert json.loads(json.dumps(found)) == SAID[name]


def test_every_example_is_run_and_short() -> None:
    files = sorted(EXAMPLES.glob("*.py"))
    assert [file.stem for file in files] == sorted(SAID)
    assert {file.name: n for file in files if (n := len(file.read_text().splitlines())) >= 100} == {}


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
