"""Spark's own stateful operators on ``dstl://``: unchanged queries, the file system's contract, bad input."""

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import pytest
from home import Home
from py4j.protocol import Py4JJavaError
from pyspark.sql import DataFrame, SparkSession

from bench._stateful_queries import stateful_queries
from dstl.checkpoint.manifest.log import ManifestLog
from dstl.errors import Invalid
from dstl.runtime import system_runtime
from dstl.spark import StateBackend, jar_path
from dstl.store import LocalStore
from worlds.manifest_samples import checkpoint

STORE = "spark.sql.streaming.stateStore"
PROVIDERS = {
    "rocksdb": "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider",
    "hdfs": "org.apache.spark.sql.execution.streaming.state.HDFSBackedStateStoreProvider",
}
MANAGERS = "org.apache.spark.sql.execution.streaming.checkpointing"


QUERIES = stateful_queries(
    "string", delay="10 seconds", gap="5 seconds", joined="a.k = b.k AND a.v = b.v + 1 AND a.t >= b.t"
)


def rows_of(batch: int) -> list[dict[str, Any]]:
    return [
        {"k": f"k{i % 7}", "t": f"2026-01-01 00:{batch:02d}:{i % 60:02d}", "v": i % 11 + batch}
        for i in range(40 + batch)
    ]


def run(stream: Any, name: str, location: str) -> list[tuple[Any, ...]]:
    """Drain a query's input in one run; returns (batch, column, ...) of everything that its sink got."""
    query = QUERIES[name]
    got: list[tuple[Any, ...]] = []

    def take(out: DataFrame, batch: int) -> None:
        # Two actions: Spark runs the stateful tasks twice, from the same version.
        out.count()
        got.extend((batch, *row) for row in out.collect())

    writer = query.plan(stream.read()).writeStream.foreachBatch(take).outputMode(query.mode)
    writer.option("checkpointLocation", location).trigger(availableNow=True).start().awaitTermination()
    return sorted(got, key=repr)


def saved(spark: SparkSession, name: str, location: str) -> list[tuple[Any, ...]]:
    """Return what the state data source reads from a checkpoint."""
    reader = spark.read.format("statestore")
    if name == "tws":
        reader = reader.option("stateVarName", "total")
    if name == "join":
        reader = reader.option("joinSide", "left")
    return sorted((tuple(row) for row in reader.load(location).collect()), key=repr)


CASES = [("join", "rocksdb", 2), ("session", "hdfs", 1)]
ALL = [
    (name, provider, version)
    for name in QUERIES
    for provider in PROVIDERS
    for version in (1, 2)
    if not (provider == "hdfs" and (version == 2 or name == "tws"))
]


@pytest.mark.parametrize(
    ("name", "provider", "version"),
    [*CASES, *(pytest.param(*case, marks=pytest.mark.long) for case in ALL if case not in CASES)],
)
def test_an_unchanged_query_gives_the_same_rows_and_state_in_two_records_a_batch(
    name: str, provider: str, version: int, home: Home, set_conf: Any
) -> None:
    set_conf(
        {
            f"{STORE}.providerClass": PROVIDERS[provider],
            f"{STORE}.checkpointFormatVersion": str(version),
            f"{STORE}.rocksdb.changelogCheckpointing.enabled": "true",
            f"{STORE}.minDeltasForSnapshot": "2",
            "spark.sql.shuffle.partitions": "2",
        }
    )
    places = {scheme: f"{scheme}://{home.path}/{scheme}" for scheme in ("file", "dstl")}
    records = home.path / "dstl" / "_dstl" / "manifests"
    source = home.stream("k string, t timestamp, v long")
    for batch in range(2):
        source.add(rows_of(batch))
    first = {scheme: run(source, name, place) for scheme, place in places.items()}
    assert first["dstl"] == first["file"]
    source.add(rows_of(2))
    # A restart, an empty batch where watermarks ask for one, and new rows.
    second = {scheme: run(source, name, place) for scheme, place in places.items()}
    assert second["dstl"] == second["file"]
    assert saved(home.spark, name, places["dstl"]) == saved(home.spark, name, places["file"]) != []
    committed = len(list((home.path / "file" / "commits").glob("[0-9]*")))
    assert len(list(records.iterdir())) == 2 * committed + 2, "a fence for each run, and two records a batch"
    assert [each.name for each in (home.path / "dstl").iterdir()] == ["_dstl"]
    assert not list((home.path / "dstl" / "_dstl").rglob("*.seg")), "small changes lie in the records"


def test_sparks_own_checkpoint_file_manager_finds_what_it_asks_of_a_file_system(home: Home) -> None:
    """The one that Spark takes by itself; the session's other queries have the other one, which lists no links."""
    jvm = home.spark._jvm
    root, conf = f"dstl://{home.path}/query/state/0/0", home.spark._jsc.hadoopConfiguration()

    def path(name: str = "") -> Any:
        return jvm.org.apache.hadoop.fs.Path(f"{root}/{name}" if name else root)

    files = getattr(jvm, MANAGERS).CheckpointFileManager.create(path(), conf)
    assert "FileContextBased" in files.getClass().getName(), "its rename says whether it may overwrite"

    def write(name: str, content: bytes, *, overwrite: bool, cancel: bool = False) -> None:
        before = names()
        out = files.createAtomic(path(name), overwrite)
        out.write(content)
        assert names() == before, "a file is whole or not there"
        if cancel:
            out.cancel()
        else:
            out.close()

    def names() -> list[str]:
        return sorted(each.getPath().getName() for each in files.list(path()))

    def read(name: str) -> bytes:
        stream = files.open(path(name))
        try:
            return bytes(stream.readAllBytes())
        finally:
            stream.close()

    assert not files.exists(path())
    files.mkdirs(path("deep"))
    write("cancelled", b"x", overwrite=False, cancel=True)
    write("1.delta", b"first", overwrite=False)
    assert read("1.delta") == b"first"
    with pytest.raises(Py4JJavaError, match="FileAlreadyExistsException"):
        write("1.delta", b"second", overwrite=False)
    assert read("1.delta") == b"first"
    write("1.delta", b"third", overwrite=True)
    large = bytes(range(256)) * (36 << 10)
    write("large", large, overwrite=False)
    assert read("1.delta") == b"third"
    assert read("large") == large, "9 MiB, in parts"
    assert names() == ["1.delta", "deep", "large"]
    files.delete(path("1.delta"))
    files.delete(path("1.delta"))
    # An SST file goes past the manager.
    local = home.path / "7.sst"
    local.write_bytes(large)
    system = path().getFileSystem(conf)
    system.copyFromLocalFile(jvm.org.apache.hadoop.fs.Path(str(local)), path("SSTs/7-ab.sst"))
    system.copyToLocalFile(path("SSTs/7-ab.sst"), jvm.org.apache.hadoop.fs.Path(str(home.path / "back.sst")))
    assert (home.path / "back.sst").read_bytes() == large
    assert system.getFileStatus(path("SSTs/7-ab.sst")).getLen() == len(large)
    assert names() == ["SSTs", "deep", "large"]


def test_a_plain_checkpoint_is_taken_over_where_it_is_and_left_as_it_was(home: Home, one_partition: None) -> None:
    source = home.stream("k string, t timestamp, v long")
    source.add(rows_of(0))
    plain = home.path / "plain"
    run(source, "count", str(plain))
    before = {path: path.read_bytes() for path in plain.rglob("*") if path.is_file()}
    source.add(rows_of(1))
    adopted = run(source, "count", f"dstl://{plain}")
    assert {path: path.read_bytes() for path in before} == before
    assert adopted == run(source, "count", str(plain))
    assert saved(home.spark, "count", f"dstl://{plain}") == saved(home.spark, "count", str(plain))


def test_bad_input_ends_the_query_at_its_start_with_one_clear_error(home: Home) -> None:
    source = home.stream("k string, t timestamp, v long")
    source.add(rows_of(0))
    foreign = home.path / "foreign"
    foreign.mkdir()
    (foreign / "accounts.txt").write_text("of somebody else")
    with pytest.raises(Exception, match=r"accounts\.txt"):
        run(source, "count", f"dstl://{foreign}")
    assert not (foreign / "_dstl").exists()
    # Of a StateBackend, say.
    taken = LocalStore(str(home.path / "taken" / "_dstl"))

    async def take() -> None:
        log = ManifestLog(taken, system_runtime())
        await log.fence("0123-a-query")
        await log.commit(checkpoint(2, 0, query_id="0123-a-query"), [])

    asyncio.run(take())
    before = sorted((home.path / "taken").rglob("*"))
    with pytest.raises(Exception, match="0123-a-query"):
        run(source, "count", f"dstl://{home.path}/taken")
    assert sorted((home.path / "taken").rglob("*")) == before
    with pytest.raises(Exception, match="names no directory"):
        run(source, "count", "dstl:///")
    # An option is read when the application starts.
    location = home.path / "late"
    for name in ("spark.dstl.commit", "spark.dstl.batching.byte_budget"):
        refusal = rf"{re.escape(name)}=1 is set in a session.*before the application starts"
        home.spark.conf.set(name, "1")
        try:
            with pytest.raises(Exception, match=refusal):
                run(source, "count", f"dstl://{location}")
            with pytest.raises(Invalid, match=refusal):
                StateBackend(str(location), spark=home.spark)
        finally:
            home.spark.conf.unset(name)
    assert not location.exists()
    with pytest.raises(Exception, match="checkpoint locations of streaming queries"):
        home.spark.range(3).write.json(f"dstl://{home.path}/a-sink")


def test_the_secret_is_in_no_configuration_and_no_list_of_processes(spark: SparkSession) -> None:
    confs = json.dumps(spark.sparkContext.getConf().getAll())
    assert "secret" not in confs.replace("spark.authenticate.secret", "").lower()
    lines = [p.read_bytes() for p in Path("/proc").glob("[0-9]*/cmdline") if _readable(p)]
    found = {line.split(b"\0", 1)[1] for line in lines if b"dstl.process" in line and jar_path().encode() not in line}
    assert found == {b"-P\0-m\0dstl.process\0"}


def _readable(path: Path) -> bool:
    try:
        path.read_bytes()
    except OSError:
        return False
    return True
