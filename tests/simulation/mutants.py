"""Known bugs, built in again while the product runs: those of ``bugs.toml``, and the museum's."""

from __future__ import annotations

import gc
import importlib
import inspect
import tomllib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import pytest

from tests.simulation.faults import FaultKind, FaultPlan

Patch = pytest.MonkeyPatch
ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Mutant:
    """A known bug.

    Attributes:
        name: Its own.
        what: What it does.
        build_in: Patches the product.
        world: ``query``, or ``files`` where a query of Spark's own is to show it.
        kept_by: The named test that fails with it; empty where seeds show it.
        run_test: Runs that test, where it is not one that pytest can be asked for.
        faults: A plan under which few seeds show it; None where there is none.
    """

    name: str
    what: str
    build_in: Callable[[Patch], None]
    world: str = "query"
    kept_by: str = ""
    run_test: Callable[[int], None] | None = None
    faults: dict[str, Any] | None = None

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


def edited_mutants() -> list[Mutant]:
    """Return the bugs of ``bugs.toml``."""
    bugs = tomllib.loads((Path(__file__).parent / "bugs.toml").read_text())
    return [
        Mutant(
            name,
            bug["what"],
            partial(edit, bug["edits"]),
            bug.get("world", "query"),
            bug.get("kept_by", ""),
            faults=bug.get("plan"),
        )
        for name, bug in bugs.items()
    ]


def museum_mutants() -> list[Mutant]:
    """Return the museum's; its tests are run without a world of seeds."""
    from museum import flink, ours  # type: ignore[import-not-found]  # tests/ is on the path, as with pytest

    return [
        Mutant(
            bug.build_in.__name__,
            " ".join((bug.build_in.__doc__ or "").split()),
            bug.build_in,
            kept_by=bug.seen_by.partition("::")[2],
            run_test=bug.run_test,
        )
        for bug in (*flink.BUGS, *ours.BUGS)
    ]


def edit(edits: Sequence[Sequence[str]], patch: Patch) -> None:
    """Give every function of some modules the code that it has where each text is replaced by another.

    Raises:
        ValueError: A text is not once in its module: the bug has to be written anew.
    """
    sources: dict[str, str] = {}
    for module, old, new in edits:
        source = sources.setdefault(module, (ROOT / module).read_text())
        if source.count(old) != 1:
            raise ValueError(f"{module} has {source.count(old)} times: {old}")
        sources[module] = source.replace(old, new)
    gc.unfreeze()  # what was frozen is not shown
    for module, source in sources.items():
        path = str(importlib.import_module(module.removesuffix(".py").replace("/", ".")).__file__)
        codes = [list(_functions(compile(each, path, "exec"))) for each in ((ROOT / module).read_text(), source)]
        changed = {(a.co_qualname, a.co_firstlineno): b for a, b in zip(*codes, strict=True)}
        for each in gc.get_objects():
            if isinstance(each, FunctionType) and each.__code__.co_filename == path:
                code = changed.get((each.__code__.co_qualname, each.__code__.co_firstlineno))
                if code is not None:
                    patch.setattr(each, "__code__", code)


def _functions(code: CodeType) -> Iterator[CodeType]:
    """Yield the code of every function that is in no other, in the order of the source."""
    for constant in code.co_consts:
        if isinstance(constant, CodeType) and constant.co_flags & inspect.CO_OPTIMIZED:
            yield constant
        elif isinstance(constant, CodeType):
            yield from _functions(constant)
