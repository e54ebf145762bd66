"""Pages of the documentation as programs: their blocks, and a reader that does what they say."""

from __future__ import annotations

import contextlib
import importlib
import io
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType

from typer.testing import CliRunner

from dstl.cli import application

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "dstl" / "docs"
PAGES = sorted(str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md"))
RUN = {"python", "sh"}
RUNNABLE = ["README.md", *(page for page in PAGES if "```python" in (DOCS / page).read_text())]

_PIECE = re.compile(
    r"^<!-- setup\n(?P<setup>.*?)^-->$"
    r"|(?:^<!-- (?P<mark>[^\n]*) -->\n)?^```(?P<language>[^\n]*)\n(?P<code>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True)
class Block:
    """A block of a page, or a set-up that readers do not see."""

    language: str
    code: str
    mark: str
    line: int


def blocks(text: str) -> Iterator[Block]:
    for found in _PIECE.finditer(text):
        line = text.count("\n", 0, found.start()) + 1
        if found["setup"] is not None:
            yield Block("python", found["setup"], "setup", line)
        else:
            yield Block(found["language"], found["code"], found["mark"] or "", line)


class Reader:
    """Does what a page says, from top to bottom."""

    def __init__(self, name: str) -> None:
        self.name = name
        # Classes of a module that nobody can import travel to the workers whole.
        self.names: dict[str, object] = {"__name__": "page"}
        self.said = ""

    def follow(self, block: Block) -> None:
        where = f"{self.name}:{block.line}"
        if block.mark.startswith("not run: "):
            return
        if block.mark.startswith("file: "):
            path = Path(block.mark.removeprefix("file: "))
            assert not path.is_absolute(), f"{where}: a file of the page's own directory"
            assert ".." not in path.parts, f"{where}: a file of the page's own directory"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block.code)
        elif block.language == "python":
            # Lines of an error are those of the page.
            code = compile("\n" * block.line + block.code, self.name, "exec")
            self.said = _said(code, self.names)
        elif block.language == "sh":
            for command in block.code.splitlines():
                program, *words = command.split()
                if program == "python":
                    self.said = _script(*words)
                    continue
                assert program == "dstl", f"{where}: only dstl and python are run; mark the block as not run"
                done = CliRunner().invoke(application(), words)
                assert done.exit_code == 0, f"{where}: {command}: {done.output}"
        elif block.mark == "output":
            assert self.said == block.code, where


def _said(code: CodeType, names: dict[str, object]) -> str:
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        exec(code, names)
    return said.getvalue()


def _script(name: str, *arguments: str) -> str:
    """Run a file of this directory as ``python`` would, but in this process, whose Spark it shares."""
    before, path, known = sys.argv, list(sys.path), set(sys.modules)
    sys.argv, sys.path[0:0] = [name, *arguments], [str(Path.cwd())]
    importlib.invalidate_caches()
    try:
        # A class of the main program travels to the workers whole.
        return _said(compile(Path(name).read_text(), name, "exec"), {"__name__": "__main__"})
    finally:
        sys.argv, sys.path[:] = before, path
        here = str(Path.cwd())
        for each in set(sys.modules) - known:
            if str(getattr(sys.modules[each], "__file__", None)).startswith(here):
                del sys.modules[each]


def follow(page: str) -> None:
    """Run a page of the documentation, or the README's first program, in this directory."""
    reader = Reader(page)
    if page == "README.md":
        program, output, *_ = blocks((ROOT / page).read_text())
        assert (program.language, output.mark) == ("python", "output")
        found = [program, output]
    else:
        found = list(blocks((DOCS / page).read_text()))
    for block in found:
        reader.follow(block)
