import os
from pathlib import Path
from typing import Any

import pytest

from dstl.errors import Invalid
from dstl.store import LocalStore, MemoryStore, S3Store, ShardedStore, open_store
from dstl.store.location import absolute_location, shared_location, split_locations


def test_each_scheme_opens_its_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for location, kind, shown in (
        (str(tmp_path), LocalStore, str(tmp_path)),
        (f"file://{tmp_path}", LocalStore, str(tmp_path)),
        ("relative/dir", LocalStore, "relative/dir"),
        ("memory://open", MemoryStore, "memory://open"),
        ("memory://open/a/b", MemoryStore, "memory://open/a/b"),
        ("s3://my-bucket", S3Store, "s3://my-bucket"),
        ("s3://my-bucket/", S3Store, "s3://my-bucket"),
        ("s3://my-bucket/job/1/", S3Store, "s3://my-bucket/job/1"),
        ("s3a://my-bucket/job", S3Store, "s3://my-bucket/job"),
        ("s3://b-1/x,s3://b-2/x", ShardedStore, "s3://b-1/x,s3://b-2/x"),
        ("/with,comma", LocalStore, "/with,comma"),
        ("/one,/two", ShardedStore, "/one,/two"),
        (f"file:{tmp_path}", LocalStore, str(tmp_path)),
        ("./dbfs:/x", LocalStore, "./dbfs:/x"),
        ("file:///one%2C/two", LocalStore, "/one,/two"),
        (tmp_path, LocalStore, str(tmp_path)),
    ):
        store = open_store(location)
        assert type(store) is kind
        assert store.location == shown


async def test_the_home_directory_is_meant_by_its_sign(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    await open_store("~/state").put("a", b"x")
    assert (tmp_path / "state" / "a").read_bytes() == b"x"


@pytest.mark.parametrize(
    "location",
    [
        "",
        "s3://",
        "s3:///prefix",
        "s3://UPPER/x",
        "s3://b/x",
        "s3://bucket/../x",
        "s3://bucket/a//b",
        "s3://bucket/a%20b",
        "memory://",
        "memory://a/../b",
        "file://relative",
        "gs://bucket/x",
        "http://host/x",
        "a\0b",
        " ",
        "file:///a%00b",
        "file:relative",
        "s3:/bucket/x",
        "/one,,/two",
        "/one, /two",
        "s3://bucket/x,memory:/y",
        None,
        5,
        b"/x",
    ],
)
def test_what_is_no_location_is_refused(location: Any) -> None:
    for call in (open_store, absolute_location):
        with pytest.raises(Invalid):
            call(location)


@pytest.mark.parametrize(
    "location",
    ["dbfs:/x", "DBFS:/x", "hdfs:/x", "hdfs://host/x", "gs://bucket/x", "abfss://c@account/x", "wasb:x", "https://h/x"],
)
def test_a_scheme_without_a_store_never_becomes_a_directory_of_that_name(location: str) -> None:
    for given in (location, f"/fine,{location}") if "/" in location else (location,):
        with pytest.raises(Invalid, match=r"no store for \w+:.*/path or file:///path.*s3://bucket/prefix"):
            open_store(given)


def test_a_checkpoint_directory_is_not_taken_for_a_location() -> None:
    with pytest.raises(Invalid, match=r"dstl:// is Spark.s checkpoint directory, .* that its _spark is in"):
        open_store("dstl:///state/_spark")


@pytest.mark.parametrize("location", ["C:\\state", "c:/state", "/fine,D:/state"])
def test_a_drive_of_windows_is_named_as_one(location: str) -> None:
    with pytest.raises(Invalid, match="drive of Windows"):
        open_store(location)


@pytest.mark.parametrize(
    ("location", "parts"),
    [
        ("/a/my,state", ["/a/my,state"]),
        ("my,state", ["my,state"]),
        ("/a,/b", ["/a", "/b"]),
        ("here,/b,~/c", ["here", "/b", "~/c"]),
        ("/a,~backup", ["/a,~backup"]),
        ("s3://b-1/x,S3A://b-2/y,file:/z", ["s3://b-1/x", "S3A://b-2/y", "file:/z"]),
        ("/a,", ["/a,"]),
    ],
)
def test_a_comma_separates_only_where_an_absolute_location_follows(location: str, parts: list[str]) -> None:
    assert split_locations(location) == tuple(parts)


@pytest.mark.parametrize("name", ["my,state", "plain", "tail,", "x,/y", "x, /y", "%41 b", "a,s3:"])
@pytest.mark.parametrize("location", ["state", "my,state", "a,/b", "state,"])
def test_an_absolute_location_is_the_same_to_every_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, location: str
) -> None:
    """The driver's directory, a TaskManager's and a command line's: each opens the same, whatever it is called."""
    (tmp_path / name).mkdir(parents=True)
    monkeypatch.chdir(tmp_path / name)
    expected = split_locations(location)
    roots = [os.path.abspath(each) for each in expected]
    absolute = absolute_location(location)
    monkeypatch.chdir("/")
    assert absolute_location(absolute) == absolute
    store = open_store(absolute)
    stores = store.stores if isinstance(store, ShardedStore) else (store,)
    assert [each.location for each in stores] == roots


def test_a_memory_location_is_known_in_any_case_and_place() -> None:
    for location in ("memory://x", "MEMORY://x", "Memory://x/y", "/a,mEMORY://x"):
        with pytest.raises(Invalid, match="own memory"):
            shared_location(location)
    for location in ("memory", "/memory://x", "s3://memory/x", "./memory://x"):
        assert shared_location(location) == absolute_location(location)


def test_a_secret_in_a_location_is_refused_and_not_repeated() -> None:
    for location in ("s3://AKIA123:hunter2@bucket/x", "s3a://hunter2@bucket", "https://me:hunter2@host"):
        with pytest.raises(Invalid) as caught:
            open_store(location)
        assert "hunter2" not in str(caught.value)
        assert "provider chain" in str(caught.value) or location.startswith("https")
