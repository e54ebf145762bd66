"""``sealing.key_file`` and ``dstl://``: every program that opens a directory seals its objects, or refuses."""

import asyncio
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from dstl.checkpoint.manifest.format import decode_record, encode_record, manifest_name, manifest_sequence
from dstl.checkpoint.manifest.log import ManifestLog
from dstl.cli.files import app as files
from dstl.errors import CorruptData, Invalid
from dstl.options import SealingOptions
from dstl.runtime import system_runtime
from dstl.store import open_store
from dstl.store.memory import MemoryStore
from handles.file_record import FileEntry, FileRecord
from handles.segment_handle import SegmentHandle
from worlds.files import BIG, application, noise

FILES = {"state/0/0/1.changelog": b"small", "state/0/0/2.changelog": noise(BIG)}


@pytest.fixture
def key(tmp_path: Path) -> Path:
    path = tmp_path / "key"
    path.write_text("0123456789abcdef" * 4)
    path.chmod(0o600)
    return path


def run(*arguments: object, key: Path | None = None) -> Result:
    env = {"COLUMNS": "200", "DSTL_SEALING_KEY_FILE": str(key) if key else None}
    return CliRunner().invoke(files, [str(each) for each in arguments], env=env)


async def write(root: str, **options: str) -> None:
    """A batch of a driver's files and of another host's, which is an object of its own."""
    async with application({}, **options) as app:
        driver, task = await app.driver("run", root), await app.executor("127.0.0.2", "run", root)
        await driver.offsets(0)
        for jvm, (path, content) in zip((driver, task), FILES.items(), strict=True):
            await jvm.put(path, content)
        await driver.commit(0)
        for jvm in (await app.driver("run", root), await app.executor("127.0.0.2", "run", root)):
            assert [await jvm.read(path) for path in FILES] == list(FILES.values())


async def test_coordinator_and_hosts_seal_every_object_and_read_none_without_a_seal(tmp_path: Path, key: Path) -> None:
    root, location = f"dstl://{tmp_path}/job", tmp_path / "job/_dstl"
    await write(root, **{"sealing.key_file": str(key)})
    plain, sealed = open_store(location), open_store(location, sealing=SealingOptions(key_file=str(key)))
    names = [info.name async for info in plain.list()]
    assert any(name.endswith(".seg") for name in names)
    for name in names:
        assert await plain.get(name) != await sealed.get(name)
    # Who may write to the bucket, and has no key, lets the directory go on behind its last record.
    last = max(filter(None, map(manifest_sequence, names)))
    forged = await sealed.get(manifest_name(last))
    record = decode_record(forged, manifest_name(last)).model_copy(update={"sequence": last + 1})
    await plain.put(manifest_name(last + 1), encode_record(record))
    async with application({}, **{"sealing.key_file": str(key)}) as app:
        for jvm in (await app.driver("next", root), await app.executor("127.0.0.2", "next", root)):
            with pytest.raises(CorruptData, match="not what a holder of the sealing key has stored"):
                await jvm.read("offsets/0")
    async with application({}, **{"sealing.key_file": str(tmp_path / "missing")}) as app:
        with pytest.raises(Invalid, match="missing cannot be read"):
            await (await app.driver("next", root)).read("offsets/0")


def test_the_command_line_reads_sealed_files_with_the_key(tmp_path: Path, key: Path) -> None:
    """Each command; without the key none of them does anything."""
    root = f"dstl://{tmp_path}/job"
    asyncio.run(write(root, **{"sealing.key_file": str(key)}))
    fork, plain = f"dstl://{tmp_path}/fork", tmp_path / "plain"
    commands = (
        ("list", root), ("verify", root), ("export", root, plain), ("fork", root, fork), ("rollback", root, 0),
        ("list", fork), ("verify", fork),
    )  # fmt: skip
    for command in commands[:5]:
        assert run(*command).exit_code == 1, command
    for command in commands:
        done = run(*command, key=key)
        assert done.exit_code == 0, (command, done.output)
    assert (plain / "state/0/0/2.changelog").read_bytes() == FILES["state/0/0/2.changelog"], "Spark's, without seals"
    assert run("verify", fork).exit_code == 1
    asyncio.run(write(f"dstl://{tmp_path}/other"))
    assert run("list", f"dstl://{tmp_path}/other", key=key).exit_code == 1, "it was begun without a key"


def test_the_command_line_reads_the_directory_in_a_sealed_backends_log(tmp_path: Path, key: Path) -> None:
    async def begin() -> None:
        store = open_store(tmp_path / "state", sealing=SealingOptions(key_file=str(key)))
        log = ManifestLog(store, system_runtime())
        await log.fence("query")
        row = FileEntry("commits/0", 1, 0, SegmentHandle("segments/x", 1, 0), "log", 0)
        await log.commit_files("query", FileRecord.of("commits/0", "run", [row], is_whole=True), ())
        await store.close()

    asyncio.run(begin())
    listed = run("list", f"dstl://{tmp_path}/state/_spark", "--json", key=key)
    assert json.loads(listed.stdout)["batches"] == [0]
    assert "retains no checkpoint" in run("rollback", f"dstl://{tmp_path}/state/_spark", 0, key=key).stderr


async def test_plain_files_are_not_taken_over_where_objects_are_sealed(tmp_path: Path, key: Path) -> None:
    """They carry no seal; without a key they are taken over as ever."""
    root, plain = f"dstl://{tmp_path}/job", MemoryStore()
    await plain.put("offsets/0", b"v1")
    for options in ({"sealing.key_file": str(key)}, {}):
        (tmp_path / "job/offsets").mkdir(parents=True, exist_ok=True)
        (tmp_path / "job/offsets/0").write_bytes(b"v1")
        async with application({f"{tmp_path}/job": plain}, **options) as app:
            driver = await app.driver("run", root)
            if options:
                with pytest.raises(Invalid, match=r"carry no seal, and sealing\.key_file is set"):
                    await driver.names("offsets")
            else:
                assert await driver.read("offsets/0") == b"v1"
    assert not (tmp_path / "job/_dstl").exists()
