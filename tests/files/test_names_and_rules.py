"""Names below a checkpoint directory, and what a commit takes."""

import json

import pytest

from dstl.errors import Invalid, TaskManagerLost
from dstl.files.namespace import StateFile, barrier_batch, is_of_the_driver, is_snapshot, location_of
from dstl.files.rules import check_complete, is_ahead, is_final, needs_snapshots, next_version


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
