"""Pages of the documentation: blocks that are not run, errors that have an entry, links that lead somewhere.

``tests/spark/test_examples.py`` runs the blocks.
"""

import os
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import dstl.spark
import dstl.testing
from dstl import errors
from dstl.changelog.segment.index import FORMAT_MAJOR
from dstl.checkpoint.manifest.format import MANIFEST_VERSION
from dstl.checkpoint.savepoint.format import SAVEPOINT_VERSION
from dstl.docs.markdown import write_markdown
from dstl.docs.references import command_reference, metric_reference, option_reference, with_references
from dstl.option_sources import SECTIONS
from dstl.rpc.protocol import PROTOCOL_VERSION
from materializer.bases import table_directory
from materializer.bases.key_group_index import FORMAT_VERSION
from worlds.pages import DOCS, PAGES, ROOT, RUN, Reader, blocks

PROCESSOR = "dstl.state.handle.ProcessorHandle"
FORMATS = {
    "segment": FORMAT_MAJOR,
    "manifest": MANIFEST_VERSION,
    "savepoint": SAVEPOINT_VERSION,
    "base file": FORMAT_VERSION,
    "index of a table's files": table_directory.FORMAT_VERSION,
}
"""The newest version of each format; all before it are read."""


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
    assert "default `0.05`" in found
    assert "``" not in found
    assert ":class:" not in found


def test_the_reference_has_every_command() -> None:
    found = command_reference()
    assert "## dstl checkpoints watch\n" in found
    assert "`--grace`\n: " in found
    assert with_references("a <!-- reference: commands --> b") == f"a {found} b"
    assert metric_reference()


def test_the_api_has_every_public_name() -> None:
    page = (DOCS / "reference" / "api.md").read_text()
    shown = set(re.findall(r"^\.\. auto\w+:: [\w.]+\.(\w+)$", page, re.MULTILINE))
    members = {
        name: set(re.findall(r"\w+", listed))
        for name, listed in re.findall(r"^\.\. auto\w+:: ([\w.]+)\n   :members:((?:[^\n]+\n)+)", page, re.MULTILINE)
    }
    for listed in members.values():
        shown |= listed
    kinds = {name for name in errors.__all__ if isinstance(getattr(errors, name), type)}
    assert {*kinds, *dstl.spark.__all__, *dstl.testing.__all__} - shown == set()
    # Of what a class offers, all but calls between modules of ours.
    inside = {"dstl.spark.StateBackend": {"has_checkpoint"}, PROCESSOR: {"close_window", "end_init", "open_window"}}
    for name in ("dstl.spark.StateBackend", "dstl.spark.operators.grouped_stream.GroupedStream", PROCESSOR):
        module, _, kind = name.rpartition(".")
        offered = {each for each in dir(getattr(import_module(module), kind)) if not each.startswith("_")}
        assert offered - inside.get(name, set()) == members[name], name


def test_the_page_of_compatibility_says_what_the_code_writes_and_reads() -> None:
    page = (DOCS / "reference" / "compatibility.md").read_text()
    read = {name: f"1 to {newest}" if newest > 1 else "1" for name, newest in FORMATS.items()}
    assert dict(re.findall(r"^\| (\w[\w' ]*?) \| 1[^|]* \| (1(?: to \d+)?) \|$", page, re.MULTILINE)) == read
    assert f"now protocol {PROTOCOL_VERSION}" in page


def test_every_page_is_there_as_markdown_and_all_but_the_decisions_in_one_file(tmp_path: Path) -> None:
    write_markdown(DOCS, tmp_path)
    made = {str(each.relative_to(tmp_path)): each.read_text() for each in tmp_path.rglob("*.md")}
    assert sorted(made) == PAGES
    assert "segment_size" in made["reference/options.md"]
    for wanted in ("#### StateBackend.groupBy", "parallelism: 'int | None'", "### dstl.errors", "#### errors.Fenced"):
        assert wanted in made["reference/api.md"], wanted
    assert "## 12. Spark's own checkpoint directories" in made["explanation/design.md"]
    whole = (tmp_path / "llms-full.txt").read_text()
    for name, text in made.items():
        assert (text in whole) == (not name.startswith("decisions")), name
        for mark in ("eval-rst", "toctree", "<!-- setup", "<!-- not run"):
            assert mark not in text, (name, mark)


def test_the_readme_is_read_in_a_minute() -> None:
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 130
    assert len(text.split()) <= 900


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
    assert "preemptive_persist_threshold" in index
