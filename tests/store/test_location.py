import os
from pathlib import Path

import pytest

from dstl.errors import Invalid
from dstl.store import LocalStore, MemoryStore, PrefixedStore, S3Store, ShardedStore, open_store


def test_each_scheme_opens_its_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for location, kind, shown in (
        (str(tmp_path), LocalStore, str(tmp_path)),
        (f"file://{tmp_path}", LocalStore, str(tmp_path)),
        ("relative/dir", LocalStore, "relative/dir"),
        ("memory://open", MemoryStore, "memory://open"),
        ("memory://open/a/b", PrefixedStore, "memory://open/a/b"),
        ("s3://my-bucket", S3Store, "s3://my-bucket"),
        ("s3://my-bucket/", S3Store, "s3://my-bucket"),
        ("s3://my-bucket/job/1/", S3Store, "s3://my-bucket/job/1"),
        ("s3a://my-bucket/job", S3Store, "s3://my-bucket/job"),
        ("s3://b-1/x,s3://b-2/x", ShardedStore, "s3://b-1/x,s3://b-2/x"),
        ("/with,comma", LocalStore, "/with,comma"),
    ):
        store = open_store(location)
        assert type(store) is kind
        assert store.location == shown


async def test_a_relative_directory_stays_when_the_process_moves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    store = open_store("here")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    await store.put("a", b"x")
    assert "a" in os.listdir(tmp_path / "here")


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
    ],
)
def test_what_is_no_location_is_refused(location: str) -> None:
    with pytest.raises(Invalid):
        open_store(location)


def test_a_secret_in_a_location_is_refused_and_not_repeated() -> None:
    for location in ("s3://AKIA123:hunter2@bucket/x", "s3a://hunter2@bucket", "https://me:hunter2@host"):
        with pytest.raises(Invalid) as caught:
            open_store(location)
        assert "hunter2" not in str(caught.value)
        assert "provider chain" in str(caught.value)
