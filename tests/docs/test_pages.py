"""Pages of the documentation: blocks that are not run, errors that have an entry, links that lead somewhere.

``tests/spark/test_documentation.py`` runs the blocks.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from dstl import errors
from dstl.docs.references import command_reference, metric_reference, option_reference, with_references
from dstl.option_sources import SECTIONS
from worlds.pages import DOCS, PAGES, ROOT, RUN, Reader, blocks


def test_blocks_that_are_not_run_say_why() -> None:
    for page in PAGES:
        for block in blocks((DOCS / page).read_text()):
            if block.mark.startswith("not run"):
                assert re.fullmatch("not run: .{8,}", block.mark), f"{page}:{block.line}"
                assert block.language in RUN, f"{page}:{block.line}: is never run"


def test_a_page_that_is_wrong_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    def follow(text: str) -> None:
        reader = Reader("page")
        for block in blocks(text):
            reader.follow(block)

    follow("```python\nprint(1)\n```\n\n<!-- output -->\n```text\n1\n```\n")
    said = "<!-- output -->\n```text\n2 __main__\n```\n"
    program = "<!-- file: one.py -->\n```python\nimport sys\nprint(sys.argv[1], __name__)\n```\n"
    follow(f"{program}```sh\npython one.py 2\n```\n{said}")
    (tmp_path / "one.py").unlink()
    for wrong in (
        "```python\nassert False\n```\n",
        "```python\nprint(1)\n```\n\n<!-- output -->\n```text\n2\n```\n",
        "```sh\ndstl checkpoints list nothing\n```\n",
        "```sh\nrm x\n```\n",
        "```sh\npython nothing.py\n```\n",
        "<!-- file: /x -->\n```python\n```\n",
        "<!-- file: ../x -->\n```python\n```\n",
        "<!-- setup\nassert False\n-->\n",
    ):
        with pytest.raises((AssertionError, FileNotFoundError)):
            follow(wrong)
    assert os.listdir(tmp_path) == []


def test_every_error_has_an_entry_that_says_whether_a_restart_helps() -> None:
    page = (DOCS / "how-to" / "recover.md").read_text().partition("## Every error")[2]
    entries = {
        name: re.search(r"^\*Restart helps: (yes|no)\.\*", text, re.MULTILINE)
        for name, text in re.findall(r"^### `(\w+)`\n(.*?)(?=^###|\Z)", page, re.MULTILINE | re.DOTALL)
    }
    kinds = {name: kind for name in errors.__all__ if isinstance(kind := getattr(errors, name), type)}
    said = {name: found[1] == "yes" if found else None for name, found in entries.items()}
    assert said == {name: kind.restartable for name, kind in kinds.items()}


def test_the_reference_has_every_option_with_both_its_sides() -> None:
    found = option_reference()
    for section, kind in SECTIONS.items():
        assert f"## {section}\n" in found
        for name in kind.model_fields:
            assert f"\n`{name}`\n: *" in found, f"{section}.{name}"
    assert "default `0.01`" in found
    assert "``" not in found
    assert ":class:" not in found


def test_the_reference_has_every_command() -> None:
    found = command_reference()
    assert "## dstl checkpoints watch\n" in found
    assert "`--grace`\n: " in found
    assert with_references("a <!-- reference: commands --> b") == f"a {found} b"
    assert metric_reference()


def test_links_of_the_readme_and_of_pages_lead_to_files() -> None:
    missing = []
    for path in (ROOT / "README.md", *(DOCS / page for page in PAGES)):
        for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", path.read_text()):
            if "://" not in target and not (path.parent / target).exists():
                missing.append(f"{path.relative_to(ROOT)}: {target}")
    assert missing == []


def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("furo", reason="the site needs the extra docs")
    pytest.importorskip("myst_parser")
    command = [sys.executable, "-m", "dstl.docs", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    index = (tmp_path / "site" / "reference" / "options.html").read_text()
    assert "persist_delay_s" in index
