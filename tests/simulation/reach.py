"""Functions that no seed has entered: the simulation proves nothing about them."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
import threading
import tomllib
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import NamedTuple

PACKAGES = (
    "dstl/checkpoint",
    "dstl/taskmanager",
    "dstl/changelog",
    "dstl/state",
    "dstl/files",
    "dstl/rpc",
    "materializer",
)
"""What decides what is durable, what counts, what is read and what is deleted."""
_ROOT = Path(__file__).parents[2]


_IMPORT = """
import json, sys
entered = set()
def note(frame, event, arg):
    if event == "call":
        entered.add((frame.f_code.co_filename, frame.f_code.co_firstlineno))
sys.setprofile(note)
import tests.simulation.seeds
sys.setprofile(None)
print(json.dumps(sorted(entered)))
"""


class Function(NamedTuple):
    """A function of a module: both as they are written, ``dstl/files/index.py`` and ``FileIndex.apply``."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}::{self.name}"


def modules() -> list[Path]:
    """Return the modules of the packages."""
    return [path for package in PACKAGES for path in sorted((_ROOT / package).rglob("*.py"))]


def functions() -> dict[tuple[str, int], Function]:
    """Return all functions but those of protocols, by file and first line."""
    found: dict[tuple[str, int], Function] = {}

    def look(node: ast.AST, path: Path, names: tuple[str, ...]) -> None:
        for child in ast.iter_child_nodes(node):
            named = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))
            inner = (*names, child.name) if named else names  # type: ignore[attr-defined]
            if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)) and not _is_stub(child):
                line = min([child.lineno, *(each.lineno for each in child.decorator_list)])
                found[str(path), line] = Function(str(path.relative_to(_ROOT)), ".".join(inner))
            look(child, path, inner)

    for path in modules():
        look(ast.parse(path.read_text()), path, ())
    return found


def _is_stub(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return all(isinstance(each, ast.Expr) and isinstance(each.value, ast.Constant) for each in function.body)


def entered_functions(work: Callable[[], object]) -> set[Function]:
    """Return which functions are entered while something is done, in this thread and in those that it starts."""
    codes: set[CodeType] = set()

    def note(frame: FrameType, event: str, arg: object) -> None:
        # A tracer hears of calls alone where it wants no lines; a profiler of every return and every call of C, too.
        codes.add(frame.f_code)

    before = sys.gettrace()
    sys.settrace(note)
    threading.settrace(note)
    try:
        work()
    finally:
        threading.settrace(before)
        sys.settrace(before)
    known = functions()
    places = {(code.co_filename, code.co_firstlineno) for code in codes}
    return {known[place] for place in places if place in known}


def entered_at_import() -> set[Function]:
    """Return which functions every process of a night enters when it imports what it runs."""
    found = subprocess.run([sys.executable, "-c", _IMPORT], cwd=_ROOT, capture_output=True, check=True).stdout
    known = functions()
    return {known[file, line] for file, line in json.loads(found) if (file, line) in known}


def reasons() -> dict[Function, str]:
    """Return why no seed enters some functions, as ``unreached.toml`` says."""
    found = tomllib.loads((Path(__file__).parent / "unreached.toml").read_text())["reason"]
    return {
        Function(module, name): reason["why"]
        for reason in found
        for module, names in reason["functions"].items()
        for name in names.split()
    }
