"""A directory that lives as long as its process, and not longer than until the next one starts."""

import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest

from dstl.errors import Unavailable
from materializer.local_disk import ScratchDirectory, sweep_scratch_directories


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return tmp_path


def test_one_that_is_in_use_is_left_alone_and_a_closed_one_is_gone(place: Path) -> None:
    held = ScratchDirectory()
    assert (held.path.stat().st_mode & 0o777, held.path.parent) == (0o700, place)
    assert sweep_scratch_directories() == []
    held.close()
    held.close()
    assert list(place.iterdir()) == []


@pytest.mark.parametrize("prefix", ["dstl-", "dstl-base-"])
def test_one_whose_process_was_killed_is_swept_with_its_content(place: Path, prefix: str) -> None:
    code = (
        "import os, signal, sys\n"
        "from materializer.local_disk import ScratchDirectory\n"
        "held = ScratchDirectory(sys.argv[1])\n"
        "(held.path / 'deep').mkdir()\n"
        "(held.path / 'deep' / 'file').write_bytes(b'x' * 1000)\n"
        "print(held.path, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, prefix], stdout=subprocess.PIPE, text=True, check=False)
    left = Path(done.stdout.strip())
    assert (left / "deep" / "file").exists()
    assert sweep_scratch_directories() == [left]
    assert list(place.iterdir()) == []


def test_where_none_can_be_made_the_error_is_ours_and_names_the_place(place: Path) -> None:
    """A full TMPDIR ended the definition of an operator with a bare OSError."""
    place.rmdir()
    with pytest.raises(Unavailable, match=rf"cannot make a directory in {place}: No such file .* set another TMPDIR"):
        ScratchDirectory()
    place.mkdir()


def test_a_directory_of_like_name_that_is_not_ours_is_never_touched(place: Path) -> None:
    for name in ("dstl-backups", "dstl-demo-12345678", "dstl-", "dstl-base-", "dstl-ABCDEFGH"):
        (place / name).mkdir()
        (place / name / "file").touch()
    (place / "dstl-demo-12345678" / ".dstl-lock").touch()
    target = place / "elsewhere"
    target.mkdir()
    (target / ".dstl-lock").touch()
    (place / "dstl-linked00").symlink_to(target)
    linked = place / "dstl-linked01"
    linked.mkdir()
    (linked / ".dstl-lock").symlink_to(target / ".dstl-lock")
    (place / "dstl-file0000").touch()
    before = sorted(place.rglob("*"))
    assert sweep_scratch_directories() == []
    assert sorted(place.rglob("*")) == before


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_another_users_directory_is_never_touched(place: Path) -> None:
    theirs = place / "dstl-theirs00"
    theirs.mkdir()
    (theirs / ".dstl-lock").touch()
    os.chown(theirs, 65534, 65534)
    assert sweep_scratch_directories() == []
    assert theirs.exists()


def test_many_that_start_and_sweep_at_once_keep_what_is_theirs(place: Path) -> None:
    held: list[ScratchDirectory] = []

    def start() -> None:
        for _ in range(20):
            sweep_scratch_directories()
            held.append(ScratchDirectory())

    threads = [threading.Thread(target=start) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(held) == 160
    assert all(each.path.exists() for each in held)
    for each in held:
        each.close()
    assert list(place.iterdir()) == []
