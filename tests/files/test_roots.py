"""A checkpoint directory may be called like any of Spark's own: its query finds its files again."""

import random

import pytest

from dstl.errors import Invalid, ObjectNotFound
from dstl.files.namespace import FilePath
from dstl.files.roots import CheckpointRoots
from worlds.files import Stores, application

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
    async def ask(root: str) -> bool:
        return True

    for root in roots_of(seed, 300):
        for inner in OF_TASKS:
            for run in ("run", ""):
                roots = CheckpointRoots(ask)
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
