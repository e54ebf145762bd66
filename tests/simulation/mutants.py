"""Known bugs, ``bugs.toml``, built in again while the product runs, and the tests that keep them out."""

from __future__ import annotations

import asyncio
import builtins
import gc
import importlib
import importlib.util
import inspect
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

import pytest

from dstl import errors
from tests.simulation.faults import FaultKind, FaultPlan

Patch = pytest.MonkeyPatch
ROOT = Path(__file__).parents[2]
_LONGEST_S = 60.0


@dataclass(frozen=True)
class Mutant:
    """A known bug: an entry of ``bugs.toml``, where its fields are explained.

    Attributes:
        name: Its own.
        what: What it does.
        edits: How it is built in.
        world: ``query``, or ``files`` where a query of Spark's own is to show it.
        kept_by: The named test that fails with it; empty where seeds show it.
        fails_with: What that test fails with: an edit that merely breaks the product would look different.
        saying: Regular expression for the failure's message; None for any.
        arguments: The test's, beside ``seed``.
        faults: A plan under which few seeds show it; None where there is none.
    """

    name: str
    what: str
    edits: Sequence[Sequence[str]]
    world: str = "query"
    kept_by: str = ""
    fails_with: str = ""
    saying: str | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict)
    faults: dict[str, Any] | None = None

    def build_in(self, patch: Patch) -> None:
        """Build it in until the patch is undone."""
        edit(self.edits, patch)

    @property
    def failure(self) -> type[BaseException]:
        """The class of :attr:`fails_with`."""
        if self.fails_with == "Failed":
            return pytest.fail.Exception
        found: type[BaseException] = getattr(errors, self.fails_with, None) or getattr(builtins, self.fails_with)
        return found

    def run_test(self, seed: int) -> None:
        """Run the test of :attr:`kept_by` once; of a property-based one the part that takes an example."""
        path, name = self.kept_by.split("::")
        module = _load_tests(path)
        test = getattr(module, name)
        test = getattr(getattr(test, "hypothesis", None), "inner_test", test)
        named = {n: isinstance(v, str) and v.startswith("@") for n, v in self.arguments.items()}
        arguments = {n: getattr(module, v[1:]) if named[n] else v for n, v in self.arguments.items()}
        parameters = inspect.signature(test).parameters
        if "seed" in parameters:
            arguments.setdefault("seed", seed)
        with pytest.MonkeyPatch.context() as monkeypatch, tempfile.TemporaryDirectory() as directory:
            if "tmp_path" in parameters:
                arguments["tmp_path"] = Path(directory)
            if "monkeypatch" in parameters:
                arguments["monkeypatch"] = monkeypatch
            # What else it asks for are fixtures that take the seed alone.
            fixtures = {n: _fixture(module, n)(seed) for n in _needed(parameters) - arguments.keys()}
            if inspect.iscoroutinefunction(test):
                asyncio.run(asyncio.wait_for(_run(test, arguments, fixtures), _LONGEST_S))
            else:
                test(**arguments, **fixtures)

    def plan(self) -> FaultPlan:
        """Return the faults under which few seeds show it."""
        faults = dict(self.faults or {})
        return FaultPlan(
            per_request={FaultKind(kind): chance for kind, chance in faults.get("requests", {}).items()},
            per_task={FaultKind(kind): chance for kind, chance in faults.get("tasks", {}).items()},
            nemesis=tuple(map(FaultKind, faults.get("nemesis", ()))),
            nemesis_mean_s=faults.get("mean_s", 1.0),
            longest_delay_s=faults.get("longest_delay_s", 10.0),
            only=faults.get("only", ""),
            local_errors=faults.get("local_errors", 0.0),
        )


def _needed(parameters: Mapping[str, inspect.Parameter]) -> set[str]:
    return {name for name, each in parameters.items() if each.default is inspect.Parameter.empty}


def _fixture(module: ModuleType, name: str) -> Any:
    return inspect.unwrap(getattr(module, name, None) or getattr(_load_tests("conftest.py"), name))


async def _run(test: Any, arguments: dict[str, Any], fixtures: dict[str, Any]) -> None:
    made = {name: await each if inspect.isawaitable(each) else each for name, each in fixtures.items()}
    await test(**arguments, **made)


def known_bugs() -> list[Mutant]:
    """Return the bugs of ``bugs.toml``."""
    bugs = tomllib.loads((Path(__file__).parent / "bugs.toml").read_text())
    return [Mutant(name, faults=bug.pop("plan", None), **bug) for name, bug in bugs.items()]


@cache
def _load_tests(path: str) -> ModuleType:
    """Import a file of tests under a name of its own, so that pytest's own copy stays as it is."""
    spec = importlib.util.spec_from_file_location(f"known_bugs_{Path(path).stem}", ROOT / "tests" / path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def edit(edits: Sequence[Sequence[str]], patch: Patch) -> None:
    """Give every function of some modules the code that it has where each text is replaced by another."""
    changed = edited(edits)
    gc.unfreeze()  # what was frozen is not shown
    for each in gc.get_objects():
        if isinstance(each, FunctionType) and each.__code__.co_filename in changed:
            of_module = changed[each.__code__.co_filename]
            code = of_module.get((each.__code__.co_qualname, each.__code__.co_firstlineno))
            if code is not None:
                patch.setattr(each, "__code__", code)


def edited(edits: Sequence[Sequence[str]]) -> dict[str, dict[tuple[str, int], CodeType]]:
    """Return the code of some modules' functions behind edits, by file, and by name and line of what each of them was.

    Raises:
        ValueError: A text is not once in its module, or it makes no difference: the bug has to be written anew.
    """
    sources: dict[str, str] = {}
    for module, old, new in edits:
        source = sources.setdefault(module, (ROOT / module).read_text())
        if source.count(old) != 1:
            raise ValueError(f"{module} has {source.count(old)} times: {old}")
        sources[module] = source.replace(old, new)
    changed: dict[str, dict[tuple[str, int], CodeType]] = {}
    for module, source in sources.items():
        path = str(importlib.import_module(module.removesuffix(".py").replace("/", ".")).__file__)
        codes = [list(_functions(compile(each, path, "exec"))) for each in ((ROOT / module).read_text(), source)]
        pairs = list(zip(*codes, strict=True))
        if all(before == after for before, after in pairs):
            raise ValueError(f"{module} does what it did")
        changed[path] = {(before.co_qualname, before.co_firstlineno): after for before, after in pairs}
    return changed


def _functions(code: CodeType) -> Iterator[CodeType]:
    """Yield the code of every function that is in no other, in the order of the source."""
    for constant in code.co_consts:
        if isinstance(constant, CodeType) and constant.co_flags & inspect.CO_OPTIMIZED:
            yield constant
        elif isinstance(constant, CodeType):
            yield from _functions(constant)
