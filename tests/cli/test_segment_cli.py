import asyncio
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from dstl.changelog.segment.encoder import encode_segment
from dstl.cli.segment import app
from dstl.options import SealingOptions
from dstl.store import open_store
from worlds.segment_samples import feature_sets

RUNNER = CliRunner()


@pytest.fixture
def segment(tmp_path: Path) -> Path:
    path = tmp_path / "one.seg"
    path.write_bytes(encode_segment(feature_sets(), writer_id="writer-1", metadata={"query": "q"}))
    return path


def test_show_prints_the_index(segment: Path) -> None:
    shown = RUNNER.invoke(app, ["show", str(segment), "--json"])
    assert shown.exit_code == 0, shown.output
    found = json.loads(shown.stdout)
    assert (found["format"], found["writer_id"], found["size"]) == ("1.0", "writer-1", segment.stat().st_size)
    assert [(log["log_id"], log["from_sqn"], log["to_sqn"]) for log in found["logs"]] == [
        ("log-a", 3, 5),
        ("log-a", 9, 10),
        ("log-b", 0, 1),
        ("log-c", 1 << 40, (1 << 40) + 1),
    ]
    plain = RUNNER.invoke(app, ["show", str(segment)])
    assert plain.exit_code == 0
    for word in ("writer-1", "log-a", "metadata", "all intact", "query q"):
        assert word in plain.stdout


def test_dump_prints_the_changes_asked_for(segment: Path) -> None:
    dumped = RUNNER.invoke(app, ["dump", segment.as_uri(), "--log", "log-a", "--key-groups", "2-5", "--json"])
    assert dumped.exit_code == 0, dumped.output
    rows = [json.loads(line) for line in dumped.stdout.splitlines()]
    assert {row["log_id"] for row in rows} == {"log-a"}
    assert [(row["sqn"], row["key_group"], row["op"]) for row in rows] == [
        (3, None, "metadata"),
        (3, 2, "put"),
        (4, 2, "clear"),
        (3, 5, "put"),
        (3, 5, "delete"),
        (9, 5, "put"),
    ]
    assert rows[1]["key"] == b"k2".hex()
    plain = RUNNER.invoke(app, ["dump", str(segment), "--key-groups", "127"])
    assert "key_group=127" in plain.stdout


def test_a_segment_inside_a_larger_file_is_named_by_offset_and_size(segment: Path) -> None:
    data = segment.read_bytes()
    segment.write_bytes(b"manifest" + data + b"rest")
    where = ["--offset", "8", "--size", str(len(data))]
    for source in (str(segment), segment.as_uri()):
        assert RUNNER.invoke(app, ["show", source, *where]).exit_code == 0
    assert RUNNER.invoke(app, ["show", str(segment)]).exit_code == 1


def test_a_sealed_segment_is_read_with_the_key_however_deep_it_lies(
    segment: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = tmp_path / "key"
    key.touch(mode=0o600)
    key.write_text("0a7f3c9e5d1b8264" * 4)
    sealing = SealingOptions(key_file=str(key))
    store, name = open_store(str(tmp_path / "job"), sealing=sealing), "07/query/writer/1.seg"
    data = segment.read_bytes() + bytes(40_000)
    asyncio.run(store.put(name, data))
    path = tmp_path / "job" / name
    where = ["--size", str(segment.stat().st_size), "--json"]
    assert RUNNER.invoke(app, ["show", str(path), "--json"]).exit_code == 1, "a seal is no part of a segment"
    monkeypatch.setenv("DSTL_SEALING_KEY_FILE", str(key))
    for source in (str(path), path.as_uri()):
        shown = RUNNER.invoke(app, ["show", source, *where])
        assert shown.exit_code == 0, shown.output
        assert json.loads(shown.stdout)["writer_id"] == "writer-1"
    key.write_text("another" * 7)
    refused = RUNNER.invoke(app, ["dump", str(path), *where])
    assert refused.exit_code == 1
    assert "is not what a holder of the sealing key has stored" in refused.output


def test_what_cannot_be_read_is_one_line_and_the_exit_code_of_its_kind(segment: Path) -> None:
    data = bytearray(segment.read_bytes())
    data[20] ^= 1
    segment.write_bytes(bytes(data))
    for arguments, kind, code in (
        (["show", str(segment)], "CorruptData", 1),
        (["dump", str(segment)], "CorruptData", 1),
        (["show", str(segment) + ".gone"], "ObjectNotFound", 1),
        (["show", segment.as_uri() + ".gone"], "ObjectNotFound", 1),
        (["dump", str(segment), "--key-groups", "5-2"], "Invalid", 2),
        (["show", str(segment), "--offset", "-1"], "Invalid", 2),
        (["show", "gopher://x/y"], "Invalid", 2),
        (["show", "gopher:/x/y"], "Invalid", 2),
        (["show", "s3://bucket/x", "--endpoint-url", "key:secret@host"], "Invalid", 2),
    ):
        result = RUNNER.invoke(app, arguments)
        assert result.exit_code == code, result.output
        assert result.stderr.startswith(kind + ": ")
        assert len(result.stderr.splitlines()) == 1
        assert result.stdout == ""


def test_a_sound_manifest_is_not_called_a_damaged_segment() -> None:
    golden = Path(__file__).parent.parent / "golden"
    for name, what in (
        ("manifest_v1.dstl", "not a segment but a manifest"),
        ("savepoint_v1.dstl", "not a segment but a savepoint's record"),
        ("table_index_v1.base", "not a segment but an index"),
    ):
        for verb in ("show", "dump"):
            result = RUNNER.invoke(app, [verb, str(golden / name)])
            assert (result.exit_code, what in result.stderr) == (2, True), result.output
