"""Names below a checkpoint directory, and what a commit takes."""

import json
import random

import pytest

from dstl.errors import Invalid, ObjectNotFound, TaskManagerLost
from dstl.files.namespace import FilePath, StateFile, is_of_the_driver, is_snapshot, location_of
from dstl.files.roots import CheckpointRoots
from dstl.files.rules import check_complete, is_ahead, is_final, needs_snapshots, next_version
from handles.file_record import barrier_batch
from worlds.files import Stores, application


def test_a_location_is_beside_the_plain_files() -> None:
    assert location_of("dstl://bucket/jobs/q") == "s3://bucket/jobs/q/_dstl"
    assert location_of("dstl:///data/my%20q") == "/data/my q/_dstl"
    for wrong in ("s3://bucket/q", "dstl://"):
        with pytest.raises(Invalid):
            location_of(wrong)


def test_barriers_state_files_and_snapshots_are_told_apart() -> None:
    assert barrier_batch("offsets/12") == barrier_batch("commits/12", "commits") == 12
    assert barrier_batch("offsets/12", "commits") is None
    assert barrier_batch("offsets/.12.tmp") is barrier_batch("sources/0/12") is None
    assert StateFile.of("state/0/3/7.changelog") == StateFile("state/0/3", 7, "", "changelog", False)
    assert StateFile.of("state/0/3/left/7_a-b.zip.crc") == StateFile("state/0/3/left", 7, "a-b", "zip", True)
    assert StateFile.of("state/0/_metadata/schema/7") is None
    assert is_snapshot("state/0/3/SSTs/001-ab.sst")
    assert is_snapshot("state/0/3/7.zip")
    assert not is_snapshot("state/0/3/7.changelog")
    assert is_of_the_driver("sources/0/3")
    assert not is_of_the_driver("state/0/_metadata/v2/0")


def test_what_is_committed_is_final_while_its_commit_is_there() -> None:
    committed = {"state/0/0/3.changelog", "state/0/0/3.zip", "commits/2"}
    assert is_final("state/0/0/3.changelog", committed)
    assert not is_final("state/0/0/3.zip", committed)
    assert not is_final("state/0/0/4.changelog", committed)
    # The user has rolled back: the batch runs again.
    assert not is_final("state/0/0/3.changelog", committed - {"commits/2"})


@pytest.mark.parametrize(
    ("path", "version"),
    [
        # As PySpark 4.3 names them, with the version or batch that each holds or begins with.
        *((f"state/0/3/{store}{7}{unique}.{kind}{checksum}", 7)
          for store in ("", "left-keyToNumValues/") for unique in ("", "_93f21ceb-e7fc-4487-b5a1-1ac4bd15ac12")
          for kind in ("zip", "changelog", "delta", "snapshot") for checksum in ("", ".crc")),
        ("state/0/_metadata/v2/6", 7),
        ("state/0/_stateSchema/default/6_93f21ceb-e7fc-4487-b5a1-1ac4bd15ac12", 7),
        *((path, None) for path in (
            "state/0/3/SSTs/000008-196e68b0-5a86-4b92-8e00-7919f14b8ccb.sst", "state/0/3/logs/000008-ab.log",
            "state/0/3/_metadata/schema", "state/0/3/left-keyToNumValues/_metadata/schema",
            "state/0/_metadata/metadata", "metadata", "offsets/9", "commits/9", "sources/0/9", "sources/0/9.compact",
        )),
    ],
)  # fmt: skip
def test_state_is_ahead_of_every_version_below_its_own(path: str, version: int | None) -> None:
    assert [is_ahead(path, each) for each in (5, 6, 7)] == [version is not None] * 2 + [False]


def test_the_next_batch_begins_behind_the_newest_commit_or_on_the_newest_offsets() -> None:
    assert next_version(["metadata", "state/0/0/9.zip"]) == 0
    assert next_version(["offsets/4", "commits/3", "commits/4"]) == 5
    assert next_version(["offsets/5", "offsets/4", "commits/4"]) == 5
    assert next_version(["offsets/5", "offsets/4"]) == 5, "Spark runs them again"


def test_a_snapshot_is_needed_where_it_is_a_versions_only_copy() -> None:
    assert needs_snapshots(["state/0/0/3.zip"], 3)
    assert needs_snapshots(["state/0/0/3_a.changelog", "state/0/1/3_b.zip"], 3)
    assert not needs_snapshots(["state/0/0/3.changelog", "state/0/0/3.zip", "state/0/0/2.zip"], 3)


def test_a_commit_that_leads_to_missing_state_is_refused() -> None:
    named = b"v2\n" + json.dumps({"stateUniqueIds": {"0": [["a"], ["b", "c"]]}}).encode()
    plain = b'v1\n{"nextBatchWatermarkMs":0}'
    stores = ["state/0/0", "state/0/1/left", "state/1/0"]
    paths = [f"{store}/4_{each}.changelog" for store, each in zip(stores, "abc", strict=True)]
    before = [f"{store}/3.zip" for store in stores]
    for content in (named, plain):
        check_complete("commits/3", content, [*paths, "state/2/0/4.delta"], before)
        for i in range(3):
            with pytest.raises(TaskManagerLost, match="commits/3"):
                check_complete("commits/3", content, [*paths[:i], *paths[i + 1 :]], before)
        with pytest.raises(TaskManagerLost):
            check_complete("commits/3", content, [f"{each}.crc" for each in paths], before)
    check_complete("commits/3", plain, [], [])
    # A job that gives the state another number of partitions leaves none out, and no store of one.
    before = [f"state/0/{i}/{store}/3.zip" for i in range(3) for store in ("left", "right")] + ["state/1/0/3.zip"]
    for count in (1, 2, 5):
        after = [f"state/0/{i}/{store}/4.zip" for i in range(count) for store in ("left", "right")]
        check_complete("commits/3", plain, [*after, "state/1/0/4.zip"], before, is_rewrite=True)
        for i in range(-1, len(after) - 1):
            with pytest.raises(TaskManagerLost):
                check_complete("commits/3", plain, [*after[: max(i, 0)], *after[i + 1 :]], before, is_rewrite=True)


WORDS = ["state", "sources", "offsets", "commits", "metadata", "_metadata", "job", "0", "7", "2024", "_x", "a b"]
OF_TASKS = [
    "state/0/3/2_ab.changelog", "state/1/0/left-keyToNumValues/2.delta", "state/0/3/SSTs/1-ab.sst", "state/0/3",
]  # fmt: skip
OF_A_RUN = [
    *OF_TASKS, "offsets", "offsets/7", "commits", "commits/7", "sources/1/0", "sources/clicks/0", "sources",
    # A source may be called so, or name its own files so.
    "sources/offsets/0", "sources/0/commits/3", "sources/0/metadata",
    "state/0/_metadata/metadata", "state/0/_metadata/v2/5", "state/0/_stateSchema/default/0_ab", "state",
]  # fmt: skip
NAMED = [
    "dstl://bucket/state/2024/11/job", "dstl://bucket/sources/1/x", "dstl:///data/offsets/5/commits/6",
    "dstl://bucket/state/0/0/" + "long/" * 110 + "job", "dstl://bucket/state/0/0",
    "dstl://bucket/offsets", "dstl://bucket/metadata", "dstl://bucket/_spark/state/1/2/q",
]  # fmt: skip


def root_of(rng: random.Random) -> str:
    return "dstl://b/" + "/".join(rng.choices(WORDS, k=rng.randint(1, 7)))


def roots_of(seed: int, count: int) -> list[str]:
    rng = random.Random(seed)
    found = [*NAMED, *(root_of(rng) for _ in range(count))]
    return [each for each in found if each.rpartition("/state/")[2].partition("/")[2] != "_metadata"]


async def test_whatever_a_checkpoint_is_called_its_query_finds_its_files_again(seed: int) -> None:
    for root in roots_of(seed, 300):
        roots = CheckpointRoots()
        assert await roots.find(root, "") is None
        assert roots.place(f"{root}/metadata", "") == FilePath(root, "metadata")
        for inner in ["offsets", *OF_A_RUN]:
            there = FilePath(root, inner)
            assert there in FilePath.readings(f"{root}/{inner}")
            assert await roots.find(f"{root}/{inner}", "run") == there
            assert roots.place(f"{root}/{inner}", "run") == there
        assert await roots.find(root, "") == FilePath(root, "")

        async def is_root(asked: str, root: str = root) -> bool:
            return asked == root

        for inner in ["", "metadata", *OF_A_RUN]:
            elsewhere = CheckpointRoots(is_root)
            assert await elsewhere.find(f"{root}/{inner}".rstrip("/"), "") == FilePath(root, inner)


async def test_a_host_finds_the_files_of_tasks_without_knowing_any_root(seed: int) -> None:
    for root in roots_of(seed, 300):
        for inner in OF_TASKS:
            for run in ("run", ""):
                roots = CheckpointRoots(is_root=True)
                assert await roots.find(f"{root}/{inner}", run) == FilePath(root, inner)
                assert roots.place(f"{root}/{inner}", run) == FilePath(root, inner)


async def test_a_query_below_another_s_sources_has_a_directory_of_its_own_or_is_refused(seed: int) -> None:
    outer, inner = "dstl://b/q", "dstl://b/q/sources/1/x"
    roots = CheckpointRoots()
    roots.place(f"{outer}/metadata", "")
    # Nobody has seen where the run's directory begins: its barriers would be a source's files, which no record holds.
    with pytest.raises(Invalid, match=r"b/q/sources/1/x cannot be a checkpoint location.*dstl://b/q"):
        roots.place(f"{inner}/offsets/0", "lost")
    assert roots.place(f"{inner}/metadata", "").root == inner
    assert roots.place(f"{inner}/offsets/0", "inner").root == inner
    assert roots.place(f"{outer}/offsets/0", "outer").root == outer
    with pytest.raises(Invalid, match=r"state/0/_metadata cannot be a checkpoint location"):
        CheckpointRoots().place("dstl://b/state/0/_metadata/metadata", "")


async def test_a_refused_root_is_not_known_from_then_on() -> None:
    """Before, one query that was refused there made each look at the file system's root fail."""
    roots = CheckpointRoots()
    with pytest.raises(Invalid, match="names no directory"):
        roots.place("dstl:///metadata", "")
    assert await roots.find("dstl:///", "") is None


@pytest.mark.parametrize("path", ["file:///q/offsets/0", "dstl://b/q/../r/offsets/0"])
async def test_a_path_of_another_place_is_refused(path: str) -> None:
    with pytest.raises(Invalid):
        CheckpointRoots().place(path, "")
    with pytest.raises(ObjectNotFound, match="nothing else"):
        CheckpointRoots().place("dstl://b/q/_spark_metadata/0", "")


@pytest.mark.parametrize("root", NAMED)
async def test_a_checkpoint_under_any_name_is_there_after_a_restart(root: str, stores: Stores) -> None:
    async def begin(batch: int, run: str) -> None:
        async with application(stores) as app:
            start, query = await app.driver("", root), await app.driver(run, root)
            task = await app.executor("127.0.0.2", run, root)
            assert await start.is_there("") == (batch > 0), "what a job asks that decides between start and restart"
            assert await start.names("") == (["commits", "metadata", "offsets", "sources", "state"] if batch else [])
            if await start.size("metadata") is None:
                await start.put("metadata", b"{}", overwrite=False)
            assert await query.names("offsets") == await query.names("commits") == [str(i) for i in range(batch)]
            await query.put(f"sources/clicks/{batch}")
            await query.offsets(batch)
            await task.put(f"state/0/0/{batch + 1}.changelog", b"%d" % batch)
            assert await task.names("state/0/0") == [f"{i + 1}.changelog" for i in range(batch + 1)]
            await query.commit(batch)

    for batch in range(3):
        await begin(batch, f"run-{batch}")
    # A user resets the query.
    async with application(stores) as app:
        user = await app.driver("", root)
        await user.delete("")
        assert not await user.is_there("")
    await begin(0, "again")
