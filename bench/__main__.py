"""``python -m bench NAME ...`` runs ``bench.NAME.main``; ``python -m bench`` lists the names."""

from __future__ import annotations

import importlib
import pkgutil
import sys
from pathlib import Path


def names() -> list[str]:
    """Names of all benchmarks: the modules of this package that have a ``main``."""
    found = []
    for module in pkgutil.iter_modules([str(Path(__file__).parent)]):
        if not module.name.startswith("_") and "def main(" in Path(
            str(Path(__file__).parent / f"{module.name}.py")
        ).read_text(encoding="utf-8"):
            found.append(module.name)
    return sorted(found)


def main(argv: list[str]) -> int:
    """Run one benchmark and return its exit code."""
    if not argv or argv[0] in {"-h", "--help"} or argv[0] not in names():
        print(f"usage: python -m bench NAME [--json] ...   NAME is one of: {', '.join(names())}", file=sys.stderr)
        return 0 if argv and argv[0] in {"-h", "--help"} else 2
    returned = importlib.import_module(f"bench.{argv[0]}").main(argv[1:])
    return int(returned or 0)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
