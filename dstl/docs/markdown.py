"""The pages as plain Markdown: for readers that are programs, and for ``llms-full.txt``."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

from dstl.docs.references import with_references

_INCLUDE = re.compile(r"^```\{include\} (\S+)\n```$", re.MULTILINE)
_AUTODOC = re.compile(r"^```\{eval-rst\}\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_DIRECTIVE = re.compile(r"^\.\. auto\w+:: ([\w.]+)\n(?:   :members:((?:[^\n]+\n)+))?", re.MULTILINE)
_HIDDEN = re.compile(r"^```\{toctree\}.*?^```\n|^<!-- .*?-->\n|^---\norphan: true\n---\n", re.MULTILINE | re.DOTALL)


def markdown_of(page: Path) -> str:
    """Return a page with its references and docstrings in it, and without what only its tests and the site need."""
    text = _INCLUDE.sub(lambda found: (page.parent / found[1]).read_text(), page.read_text())
    text = _AUTODOC.sub(lambda found: "\n".join(_described(found[1])), with_references(text))
    return _HIDDEN.sub("", text)


def write_markdown(pages: Path, out: Path) -> None:
    """Write the Markdown of all pages, and ``llms-full.txt``: one behind the other, without the decisions.

    Args:
        pages: The directory of the sources.
        out: The directory of the site.
    """
    whole = []
    for page in sorted(pages.rglob("*.md"), key=lambda page: (page.parent != pages, page)):
        name = page.relative_to(pages)
        text = markdown_of(page)
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).write_text(text)
        if name.parts[0] != "decisions":
            whole.append(f"<!-- {name} -->\n{text}")
    (out / "llms-full.txt").write_text("\n".join(whole))


def _described(block: str) -> Iterator[str]:
    for name, members in _DIRECTIVE.findall(block):
        module, _, last = name.rpartition(".")
        try:
            found: Any = import_module(name)
        except ModuleNotFoundError:
            found = getattr(import_module(module), last)
        yield _entry("###", name, found)
        for each in re.findall(r"\w+", members):
            yield _entry("####", f"{last}.{each}", inspect.getattr_static(found, each))


def _entry(level: str, name: str, found: Any) -> str:
    signature = ""
    if callable(found):
        try:
            signature = str(inspect.signature(found))
        except ValueError:
            signature = "(...)"
    return f"{level} {name}\n\n```text\n{name.rpartition('.')[2]}{signature}\n\n{inspect.getdoc(found) or ''}\n```\n"
