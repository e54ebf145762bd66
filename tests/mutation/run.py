"""``PYTHONPATH=tests python -m mutation.run [--module M] [--journal FILE]``: mutants of pure modules.

Each mutant runs in a child process, against the module's own fast tests alone. One that no test has noticed survives: a
test is missing, or what was changed makes no difference. Exit code 1: a mutant has survived that is not known to be
equivalent (``equivalent.toml``).
"""

import argparse
import importlib
import importlib.abc
import importlib.util
import json
import os
import resource
import sys
import tempfile
import tomllib
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import ModuleType

import pytest
from mutation.mutants import mutants_of

ROOT = Path(__file__).parents[2]
MODULES: dict[str, list[str]] = {
    "dstl/changelog/ledger.py": [
        "tests/changelog/test_ledger.py",
        "tests/changelog/test_storage.py",
        "tests/changelog/test_flink_defects.py",
        "tests/changelog/test_storage_model.py",
    ],
    "dstl/checkpoint/record_frame.py": ["tests/checkpoint/test_record_frame.py"],
    "dstl/checkpoint/finished_attempts.py": ["tests/checkpoint/test_finished_attempts.py"],
    "dstl/checkpoint/assembly.py": ["tests/checkpoint/test_assembly.py", "tests/handles/test_base_generations.py"],
    "dstl/changelog/throttle.py": ["tests/changelog/test_throttle.py"],
    "handles/key_group.py": ["tests/handles/test_ranges.py"],
    "handles/materialized_handle.py": ["tests/handles/test_base_generations.py"],
    "dstl/checkpoint/retained_objects.py": ["tests/handles/test_shared_state_registry.py"],
    "materializer/trigger.py": ["tests/materializer/test_trigger.py"],
    "dstl/changelog/upload/hedge_limits.py": ["tests/changelog/test_hedge_limits.py"],
}
OURS = {"dstl", "handles", "materializer", "worlds", "tests", "conftest", "bench", "mutation", "fuzz"}
TIMEOUT_S = 90
MOST_BYTES = 6 << 30
QUIET = ("-q", "-n0", "-p", "no:cacheprovider", "-W", "ignore::pytest.PytestAssertRewriteWarning")
KILLED, SURVIVED, TOO_LONG = "killed", "survived", "too long"


class _Mutated(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports one module from another source."""

    def __init__(self, name: str, path: Path, source: str) -> None:
        self._name, self._path, self._source = name, path, source

    def find_spec(self, name: str, path: object = None, target: object = None) -> object:
        if name != self._name:
            return None
        return importlib.util.spec_from_loader(name, self, origin=str(self._path))

    def exec_module(self, module: ModuleType) -> None:
        exec(compile(self._source, str(self._path), "exec"), module.__dict__)


def preload(tests: Sequence[str]) -> None:
    """Import what the tests need beside our own packages, once for all mutants."""
    with tempfile.NamedTemporaryFile() as names:
        child = os.fork()
        if child == 0:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            pytest.main(["--collect-only", *QUIET, *tests])
            Path(names.name).write_text("\n".join(sys.modules))
            os._exit(0)
        os.waitpid(child, 0)
        for name in Path(names.name).read_text().splitlines():
            if name.partition(".")[0] not in OURS and not name.startswith(("_pytest.", "__")):
                with suppress(Exception):
                    importlib.import_module(name)


def try_mutant(module: str, source: str, tests: Sequence[str]) -> str:
    """Run the tests against a mutant, in a child process."""
    child = os.fork()
    if child == 0:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        os.dup2(null, 2)
        # Not an alarm, which pytest-timeout takes for its own: a mutant that allocates for ever took the whole machine.
        resource.setrlimit(resource.RLIMIT_CPU, (TIMEOUT_S, TIMEOUT_S))
        resource.setrlimit(resource.RLIMIT_AS, (MOST_BYTES, MOST_BYTES))
        name = module.removesuffix(".py").replace("/", ".")
        sys.meta_path.insert(0, _Mutated(name, ROOT / module, source))  # type: ignore[arg-type]
        os._exit(int(pytest.main(["-x", *QUIET, *tests])))
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        return TOO_LONG
    return SURVIVED if os.WEXITSTATUS(status) == 0 else KILLED


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--module", choices=sorted(MODULES), action="append")
    parser.add_argument("--journal", type=Path, help="skip what this file knows, and add to it")
    options = parser.parse_args()
    os.chdir(ROOT)
    os.environ.setdefault("DSTL_TEST_SEED", "1")
    known = {tuple(each) for each in tomllib.loads((Path(__file__).parent / "equivalent.toml").read_text())["mutants"]}
    done: dict[str, str] = {}
    if options.journal and options.journal.exists():
        done = dict(json.loads(line) for line in options.journal.read_text().splitlines())
    unknown = 0
    for module in options.module or MODULES:
        source = (ROOT / module).read_text()
        preload(MODULES[module])
        if (outcome := try_mutant(module, source, MODULES[module])) != SURVIVED:
            raise SystemExit(f"{module}: its tests fail without a mutant: {outcome}")
        counts = dict.fromkeys((KILLED, TOO_LONG, SURVIVED, "equivalent"), 0)
        for what, mutant in mutants_of(source):
            outcome = done.get(f"{module}:{what}") or try_mutant(module, mutant, MODULES[module])
            if options.journal and f"{module}:{what}" not in done:
                with options.journal.open("a") as file:
                    file.write(json.dumps([f"{module}:{what}", outcome]) + "\n")
            if outcome == SURVIVED:
                line, _, change = what.partition(": ")
                code = source.splitlines()[int(line) - 1].strip()
                is_known = bool(known & {(module, change), (module, change, code)})
                outcome = "equivalent" if is_known else SURVIVED
                unknown += not is_known
                print(f"{outcome:12}{module}:{what}", flush=True)
            counts[outcome] += 1
        print(f"{module}: {counts}", flush=True)
    return int(unknown > 0)


if __name__ == "__main__":
    sys.exit(main())
