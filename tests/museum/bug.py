"""A historical bug, built in again: what it did, how it is built in, and the test that has to fail with it."""

import asyncio
import functools
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

TESTS = Path(__file__).parents[1]
Patch = pytest.MonkeyPatch
LONGEST_S = 60.0


@dataclass(frozen=True)
class Bug:
    """One exhibit.

    Attributes:
        number: Its name where it was known first: an issue of Flink's, a seed of our simulation's.
        build_in: Patches the product; its docstring says what the bug did.
        seen_by: The named test that catches it: file below ``tests`` and function.
        fails_with: What that test fails with: a patch that merely breaks the product would look different.
        saying: Regular expression for the failure's message; None for any.
        arguments: The test's, where it has any but ``seed``.
    """

    number: str
    build_in: Callable[[Patch], None]
    seen_by: str
    fails_with: type[BaseException] = AssertionError
    saying: str | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict)

    @property
    def test(self) -> Callable[..., Any]:
        """The function of :attr:`seen_by`; of a property-based one the part that takes an example."""
        path, name = self.seen_by.split("::")
        found = getattr(load_tests(path), name)
        return getattr(getattr(found, "hypothesis", None), "inner_test", found)  # type: ignore[no-any-return]

    def run_test(self, seed: int) -> None:
        """Run the test once, as pytest would."""
        test, arguments = self.test, dict(self.arguments)
        if "seed" in inspect.signature(test).parameters:
            arguments.setdefault("seed", seed)
        with pytest.MonkeyPatch.context() as monkeypatch:
            if "monkeypatch" in inspect.signature(test).parameters:
                arguments["monkeypatch"] = monkeypatch
            result = test(**arguments)
            if inspect.iscoroutine(result):
                asyncio.run(asyncio.wait_for(result, LONGEST_S))


class Bugs(list[Bug]):
    """Bugs in the order of the functions that build them in."""

    def built_in(
        self,
        number: str,
        seen_by: str,
        fails_with: type[BaseException] = AssertionError,
        saying: str | None = None,
        /,
        **arguments: Any,
    ) -> Callable[[Callable[[Patch], None]], Callable[[Patch], None]]:
        """Add what the decorated function builds in; the arguments are those of :class:`Bug`."""

        def add(build_in: Callable[[Patch], None]) -> Callable[[Patch], None]:
            self.append(Bug(number, build_in, seen_by, fails_with, saying, arguments))
            return build_in

        return add


@functools.cache
def load_tests(path: str) -> ModuleType:
    """Import a file of tests under a name of its own, so that pytest's own copy stays as it is."""
    spec = importlib.util.spec_from_file_location(f"museum_{Path(path).stem}", TESTS / path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
