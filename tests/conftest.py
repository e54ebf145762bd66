"""Shared fixtures; the seed of every run is printed, so that a failure can be replayed with ``DSTL_TEST_SEED``."""

import gc
import os
import random
import shutil
import tempfile
from collections.abc import Iterator
from importlib.metadata import version
from itertools import cycle, groupby
from pathlib import Path

import hypothesis
import pytest

from worlds.class_archive import begin_to_make, shared_classes
from worlds.s3_place import S3Place, foreign_place, moto_place
from worlds.s3_server import S3Server
from worlds.service import Job

ROOT = Path(__file__).parents[1]
# In the environment, so that processes which share the tests have one seed, the one that is printed.
SEED = int(os.environ.setdefault("DSTL_TEST_SEED", str(random.SystemRandom().randrange(1 << 32))))

# How long an example takes says more of the machine than of the code.
hypothesis.settings.register_profile("tests", deadline=None)
hypothesis.settings.load_profile("tests")

# Hundreds of workers and TaskManagers start in these tests: they compile the modules once, not each for itself.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# Tables, stores and checkpoints are synced as they are in a job, and here a disk would wait for that a hundred times a
# second. So their files lie in memory where the system has room for them: a run leaves 100 MB.
_MEMORY, _ROOM = "/dev/shm", 4 << 30
if os.access(_MEMORY, os.W_OK) and shutil.disk_usage(_MEMORY).free > _ROOM:
    tempfile.tempdir = os.environ.setdefault("TMPDIR", _MEMORY)

# A JVM of a test lives for seconds: the second compiler and a parallel collector cost it more than they give it.
# Nor need it verify the classes of Spark's jars, or start the shells of Hadoop's file system by way of a helper.
# Without that compiler it would have a fifth of the room for code, and look all the time for what may go from there.
os.environ.setdefault(
    "JDK_JAVA_OPTIONS",
    "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -XX:+UnlockDiagnosticVMOptions -XX:-BytecodeVerificationRemote "
    "-Djdk.lang.Process.launchMechanism=VFORK -XX:ReservedCodeCacheSize=240m",
)

LONGEST = (
    "test_demo.py",
    "test_cluster_spark.py",
    "test_initial_state_spark.py",
    "test_event_time_chains_spark.py",
    "test_paths_spark.py",
    "test_driver_jar_spark.py",
)
"""Files that begin first: whatever is left for the end should be short."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--s3-endpoint", metavar="URL", help="run what is marked s3server there, with the environment's credentials"
    )


def pytest_report_header() -> str:
    return f"DSTL_TEST_SEED={SEED}"


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Leave the garbage alone while tests are imported: there is hardly any, and to look for it is a third of the work.

    Afterwards it is not looked for among the modules and the thousands of tests.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_finish(session: pytest.Session) -> None:
    """Let the JVMs of Spark's tests share its classes; the first run in a checkout makes the archive meanwhile."""
    java = shutil.which("java")
    if java is not None and any(item.get_closest_marker("spark") for item in session.items):
        name = f"{Path(java).resolve().parents[1].name}-pyspark-{version('pyspark')}.jsa"
        archive = ROOT / ".pytest_cache" / name
        os.environ["JDK_JAVA_OPTIONS"] += f" {shared_classes(archive)}"
        if not session.config.option.collectonly and (maker := begin_to_make(archive)) is not None:
            session.config.add_cleanup(maker.wait)


@pytest.fixture
def seed() -> int:
    return SEED


@pytest.fixture
def rng(seed: int) -> random.Random:
    return random.Random(seed)


@pytest.fixture
def job(seed: int) -> Job:
    """A query's job, over a store in memory whose ``rules`` are its faults."""
    return Job(seed)


@pytest.fixture
def s3_place(request: pytest.FixtureRequest) -> Iterator[S3Place]:
    """A bucket of the server that --s3-endpoint names, or else of moto's; for tests that are marked s3server."""
    endpoint_url: str | None = request.config.getoption("--s3-endpoint")
    if endpoint_url is None:
        with moto_place(request.getfixturevalue("moto_server")) as place:
            yield place
    else:
        with foreign_place(endpoint_url) as place:
            yield place


@pytest.fixture(scope="session")
def moto_server() -> Iterator[S3Server]:
    with S3Server() as server:
        yield server


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> Iterator[None]:
    """Leave to the long form what the seed has not drawn, and put the longest of what is left first."""
    _draw(items)
    yield
    _order(items)


def _draw(items: list[pytest.Item]) -> None:
    """Of the cases of a test with the marker ``drawn`` (of all tests, with its ``group``) this run has so many."""

    def group(item: pytest.Item) -> tuple[str, str]:
        marker = item.get_closest_marker("drawn")
        assert marker is not None
        return str(item.path), marker.kwargs.get("group", getattr(item, "originalname", item.name))

    cases = sorted((item for item in items if item.get_closest_marker("drawn")), key=group)
    for name, each in groupby(cases, key=group):
        drawable = list(each)
        marker = drawable[0].get_closest_marker("drawn")
        assert marker is not None
        count = min(marker.args[0], len(drawable))
        chosen = random.Random(f"{SEED}-{name[1]}").sample(drawable, count)
        for item in drawable:
            if item not in chosen:
                item.add_marker(pytest.mark.long)


def _order(items: list[pytest.Item]) -> None:
    """Put what takes long before what does not, in each process's share of the tests.

    Each process begins with its share, and one that has ended takes over from the end of another's. One process has no
    session of Spark's, which costs half a minute of a core before it is as quick as the others: it begins with the
    tests that start JVMs of their own.
    """
    processes = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    shares: list[list[pytest.Item]] = [[] for _ in range(processes)]
    by_file: dict[tuple[Path, bool], list[pytest.Item]] = {}
    quick = []
    for item in items:
        if item.get_closest_marker("spark"):
            has_session = isinstance(item, pytest.Function) and "spark" in item.fixturenames
            by_file.setdefault((item.path, has_session), []).append(item)
        else:
            quick.append(item)
    files = sorted(by_file, key=lambda file: LONGEST.index(file[0].name) if file[0].name in LONGEST else len(LONGEST))
    with_sessions = cycle(shares[: max(1, processes - 1)])
    for path, has_session in files:
        share = next(with_sessions) if has_session else shares[-1]
        share += by_file[path, has_session]
    size = len(items) // processes
    items.clear()
    for share in shares:
        rest = len(quick) if share is shares[-1] else max(0, size - len(share))
        items += share + quick[:rest]
        del quick[:rest]
