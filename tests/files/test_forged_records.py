"""Records that somebody else has written into a bucket: they choose neither what is opened nor how much is taken."""

import random
import tracemalloc
from pathlib import Path

import pytest

from dstl.checkpoint.manifest.format import ManifestRecord, decode_record, encode_record, manifest_name
from dstl.checkpoint.manifest.log import ManifestLog
from dstl.errors import DstlError, Invalid, MissingState, ObjectNotFound
from dstl.files.forking import fork
from dstl.files.index import FileTree
from dstl.files.inspection import export_files, opened_files, verify_files
from dstl.files.namespace import FilePath
from dstl.files.origins import Origins
from dstl.files.roots import CheckpointRoots
from dstl.runtime import system_runtime
from dstl.store import LocalStore, open_store
from dstl.store.base import ObjectStore
from handles.file_record import FILES_OWNER, MAX_PATH, FileEntry, FileRecord, elsewhere
from handles.segment_handle import SegmentHandle
from worlds.files import Stores, application

SECRET = b"aws_secret_access_key = TOP-SECRET-0123456789\n"


async def forge(store: ObjectStore, *entries: FileEntry) -> None:
    """Write a whole record, as anybody can who may write there."""
    log = ManifestLog(store, system_runtime())
    await log.fence(FILES_OWNER)
    record = FileRecord.of("offsets/0", "run", entries, is_whole=True)
    await log.commit_files(FILES_OWNER, record, (), oldest=0)


def below(directory: Path) -> list[Path]:
    return sorted(path for path in directory.rglob("*") if path.is_file())


def entry(name: str, path: str = "sources/0/0", log_id: str = "") -> FileEntry:
    return FileEntry(path, len(SECRET), 0, SegmentHandle(name, len(SECRET), 0), log_id, 0)


@pytest.mark.parametrize("log_id", ["", "log"])
@pytest.mark.parametrize(
    "forged",
    [
        elsewhere("{home}", "credentials"),
        elsewhere("{home}", "sources/0/0"),
        elsewhere("{home}/_dstl", "sources/0/0"),
        elsewhere("{bucket}/../home", "sources/0/0"),
        elsewhere("{bucket}/other,{home}", "sources/0/0"),
        elsewhere("file://{home}", "sources/0/0"),
        elsewhere("{bucket}/other", "credentials"),
        "plain:credentials",
        "plain:../../home/credentials",
    ],
)
async def test_a_record_does_not_choose_which_files_of_the_host_are_read(
    tmp_path: Path, forged: str, log_id: str
) -> None:
    """With the index of a directory, through the command line's code and through the service that Spark asks."""
    bucket, home = tmp_path / "bucket", tmp_path / "home"
    for place in (home, home / "_dstl", bucket / "other", bucket / "job"):
        for name in ("credentials", "sources/0/0"):
            if (place, name) != (bucket / "job", "sources/0/0"):
                (place / name).parent.mkdir(parents=True, exist_ok=True)
                (place / name).write_bytes(SECRET)
    (bucket / "other/sources/0/0").unlink()
    name = forged.format(home=str(home), bucket=str(bucket))
    store = LocalStore(str(bucket / "job/_dstl"))
    await forge(store, entry(name, log_id=log_id))
    root = f"dstl://{bucket}/job"
    async with opened_files(root, system_runtime(), open_store) as files:
        with pytest.raises(DstlError):
            await export_files(files, LocalStore(str(tmp_path / "exported")))
        if not name.startswith("plain:"):
            assert list(files.elsewhere.values()) == [str(bucket / "other") in name and "," not in name]
    assert not below(tmp_path / "exported")
    plain = LocalStore(str(bucket / "job"))
    async with application({store.location: store, plain.location: plain}) as app:
        driver, task = await app.driver("run", root), await app.executor("127.0.0.2", "run", root)
        for jvm in (driver, task):
            with pytest.raises(DstlError):
                await jvm.read("sources/0/0")
        assert set(app.stores) <= {str(bucket / each) for each in ("job", "job/_dstl", "other")}


async def test_what_lies_elsewhere_is_read_where_the_operator_has_named_it(tmp_path: Path) -> None:
    """Of a fork into another directory's tree; the refusal says which option names it, for either program."""
    source, target = f"dstl://{tmp_path}/one/job", f"dstl://{tmp_path}/two/job"
    (tmp_path / "one/job/offsets").mkdir(parents=True)
    (tmp_path / "one/job/offsets/0").write_bytes(b"v1")
    stores: Stores = {}
    for root in (source, target):
        place = root.removeprefix("dstl://")
        stores |= {each: LocalStore(each) for each in (place, f"{place}/_dstl")}
    async with application(dict(stores)) as app:
        await (await app.driver("run", source)).batch(1, {"state/0/0/2.changelog": b"state"})
    made = await fork(source, target, system_runtime(), open_store)
    assert made.also == (source,)
    async with opened_files(target, system_runtime(), open_store) as files:
        problems = await verify_files(files)
        assert len(problems) == 4
        assert all(f"--also {source}" in each and f"spark.dstl.also={source}" in each for each in problems)
    async with opened_files(target, system_runtime(), open_store, [f"{source}/"]) as files:
        assert await verify_files(files) == []
    for options in ({}, {"also": source}):
        async with application(dict(stores), **options) as app:
            driver, task = await app.driver("run", target), await app.executor("127.0.0.2", "run", target)
            for jvm in (driver, task):
                if options:
                    assert [await jvm.read(each) for each in ("offsets/0", "state/0/0/2.changelog")] == [
                        b"v1",
                        b"state",
                    ]
                else:
                    with pytest.raises(MissingState, match="so nothing of it is opened"):
                        await jvm.read("offsets/0")
    with pytest.raises(Invalid, match="not a checkpoint directory"):
        async with application({}, also="/jobs/query"):
            pass


@pytest.mark.parametrize(
    ("root", "location", "is_beside"),
    [
        ("dstl://bucket/jobs/a", "s3://bucket/dev/b/_dstl", True),
        ("dstl://bucket/jobs/a", "s3://bucket/dev/b", True),
        ("dstl://bucket/jobs/a", "s3://bucket2/dev/b/_dstl", False),
        ("dstl://bucket/jobs/a", "s3://bucket/x,/etc/_dstl", False),
        ("dstl://bucket/jobs/a", "s3a://bucket/b/_dstl", False),
        ("dstl://bucket/jobs/a", "/bucket/b/_dstl", False),
        ("dstl:///jobs/a", "/jobs/b/_dstl", True),
        ("dstl:///jobs/a", "/jobs/_dstl", False),
        ("dstl:///jobs/a", "/jobs/", False),
        ("dstl:///jobs/a", "/jobs/..", False),
        ("dstl:///jobs/a", "/jobs/b/c/_dstl", False),
        ("dstl:///jobs/a", "/jobs/b,/etc", False),
        ("dstl:///jobs/a", "jobs/b", False),
        ("dstl:///jobs/a", "memory://b", False),
        ("dstl:///jobs/a", "", False),
        ("dstl:///jobs/a", "/jobs/b\0", False),
        ("dstl:///jobs/a/_spark", "/jobs/a/b/_dstl", False),
    ],
)
def test_beside_a_directory_is_its_bucket_or_its_parent_directory(root: str, location: str, is_beside: bool) -> None:
    assert Origins(root, (), open_store).allows(location) is is_beside


async def test_a_fork_takes_over_no_directory_that_only_a_record_names(tmp_path: Path) -> None:
    hostile, victim, mine = (f"dstl://{tmp_path}/{name}" for name in ("hostile", "payments", "mine"))
    for root, name, log_id in (
        (victim, "plain:offsets/0", ""),
        (hostile, elsewhere(f"{tmp_path}/payments/_dstl", "segments/x.seg"), "log"),
    ):
        await forge(LocalStore(f"{root.removeprefix('dstl://')}/_dstl"), entry(name, "offsets/0", log_id))
    before = below(tmp_path)
    with pytest.raises(Invalid, match=f"--also {victim}"):
        await fork(hostile, mine, system_runtime(), open_store)
    assert below(tmp_path) == before, "nobody is fenced, the hostile directory neither"
    await fork(hostile, mine, system_runtime(), open_store, [victim])
    assert len(below(tmp_path / "payments")) > 2


@pytest.mark.parametrize(
    "path", ["", "/a", "a/", "a//b", "state/../../x", "./a", "a\0b", "state/0/0/" + "a/" * 300 + "x"]
)
@pytest.mark.parametrize("field", ["added", "removed"])
def test_a_path_in_a_record_is_bounded(path: str, field: str) -> None:
    row = [path, 1, 0, 0, 0, 0] if field == "added" else path
    plain = {"barrier": "offsets/0", "run_id": "r", "segments": [["x", 1, 0, 0]], "logs": ["l"], "added": []}
    with pytest.raises(ValueError, match="not a path of a file"):
        FileRecord.model_validate(plain | {field: [row]})
    assert FileRecord.model_validate(plain | {"removed": ["a" * MAX_PATH]}).removed


def test_what_spark_puts_is_no_longer_than_a_record_takes() -> None:
    front = "dstl:///jobs/query/state/0/0/"
    longest = front + "x" * (MAX_PATH - len("state/0/0/"))
    assert len(FilePath.readings(longest)[1].inner) == MAX_PATH
    with pytest.raises(ObjectNotFound, match="more than 512 characters"):
        CheckpointRoots().place(longest + "x", "")


def test_the_memory_of_directories_grows_as_their_paths_do() -> None:
    """Every prefix of a path was a text of its own: half of the path's length squared."""
    tree = FileTree()
    path = "/".join("a" * 36_000)
    tracemalloc.start()
    tree.add(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 500 * len(path)
    assert (tree.names(""), tree.count("a/a", "a")) == (("a",), 1)
    tree.remove(path)
    assert tree.names("") == ()


def test_the_tree_of_directories_is_that_of_the_paths(rng: random.Random) -> None:
    tree, held = FileTree(), set[str]()
    for _ in range(300):
        path = "/".join(rng.choice("abc") for _ in range(rng.randrange(1, 4)))
        if path in held:
            held.discard(path)
            tree.remove(path)
        else:
            held.add(path)
            tree.add(path)
        for directory in ("", "a", "a/b", "c"):
            front = f"{directory}/" if directory else ""
            below = [each.removeprefix(front).partition("/")[0] for each in held if each.startswith(front)]
            assert sorted(tree.names(directory)) == sorted(set(below))
            assert [tree.count(directory, name) for name in "abc"] == [below.count(name) for name in "abc"]


def test_the_most_regular_index_that_there_can_be_is_still_read() -> None:
    handle, front = SegmentHandle("x", 1, 0), f"sources/0/{'x' * (MAX_PATH - 16)}"
    rows = [FileEntry(f"{front}/{number}", 1, 0, handle, "l", 0) for number in range(10_000)]
    files = FileRecord.of("commits/0", "run", rows, is_whole=True)
    data = encode_record(
        ManifestRecord(kind="files", sequence=2, epoch=1, put_id="", query_id="files", created_at=0, files=files)
    )
    assert len(data) < 5 * len(rows)
    assert decode_record(data, manifest_name(2)).files == files
