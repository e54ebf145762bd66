"""Functions that no seed has entered, and branches that none has taken: the simulation proves nothing about them."""

from __future__ import annotations

import ast
import dis
import json
import subprocess
import sys
import tempfile
import threading
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

from dstl.errors import Invalid
from tests.simulation.runner import run_seed

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


def untaken_branches(
    seeds: Iterable[int], looked_at: Sequence[Path] = ()
) -> Mapping[str, tuple[int, list[tuple[int, int]]]]:
    """Run seeds, in this process, and return by module how many branches it has and which were not taken.

    A branch is a line and the line that it goes to; a negative one is the end of the function that begins there. It
    takes five times as long as without.

    Args:
        seeds: They are run.
        looked_at: The modules; all by default.

    Raises:
        Invalid: ``coverage`` is not installed.
    """
    try:
        import coverage
    except ImportError:
        raise Invalid("pip install 'dstl-pyspark[test]': branches are counted by coverage") from None
    paths = [str(path) for path in looked_at or modules()]
    with _steps_recorded(paths) as steps:
        for seed in seeds:
            run_seed(seed)
    measured = coverage.Coverage(data_file=None, branch=True, include=paths)
    measured.get_data().add_arcs(steps)
    with tempfile.TemporaryDirectory() as directory:
        report = Path(directory) / "report.json"
        measured.json_report(paths, outfile=str(report))
        files = json.loads(report.read_text())["files"]
    measured.get_data().close(force=True)  # a database in memory, of which Python 3.13 warns when it is collected
    found: dict[str, tuple[int, list[tuple[int, int]]]] = {}
    for name, file in files.items():
        at = str(Path(name).resolve().relative_to(_ROOT.resolve()))
        found[at] = file["summary"]["num_branches"], [(line, to) for line, to in file["missing_branches"]]
    return found


@contextmanager
def _steps_recorded(paths: Iterable[str]) -> Iterator[Mapping[str, set[tuple[int, int]]]]:
    """Record the steps from line to line, by file, of what is run in this thread and in those that it starts.

    Coverage's own tracer keeps one stack of frames. With Python 3.11 it loses the lines behind an ``await`` in which an
    asynchronous generator has ended, for the stack is out of step then. Here each frame knows its own line.
    """
    steps: dict[str, set[tuple[int, int]]] = {path: set() for path in paths}

    def trace(frame: FrameType, event: str, arg: object) -> Callable[..., Any] | None:
        found = steps.get(frame.f_code.co_filename)
        if found is None:
            return None
        code, first = frame.f_code, -frame.f_code.co_firstlineno
        # A frame that goes on behind an await or a yield begins where it stood.
        line = first if code.co_code[frame.f_lasti + 1] == 0 else frame.f_lineno

        def step(frame: FrameType, event: str, arg: object) -> Callable[..., Any]:
            nonlocal line
            if event == "line":
                found.add((line, frame.f_lineno))
                line = frame.f_lineno
            elif event == "return" and dis.opname[code.co_code[frame.f_lasti]].startswith("RETURN"):
                found.add((line, first))
            return step

        return step

    before = sys.gettrace()
    sys.settrace(trace)
    threading.settrace(trace)
    try:
        yield steps
    finally:
        threading.settrace(before)
        sys.settrace(before)
