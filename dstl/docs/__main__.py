"""Builds the site: ``python -m dstl.docs [DIRECTORY]`` writes it to ``site/``; a warning is an error."""

from __future__ import annotations

import sys
from pathlib import Path

__all__ = ["main"]

HERE = Path(__file__).parent


def main(arguments: list[str]) -> int:
    """Build the site and return the exit code."""
    try:
        from sphinx.cmd.build import build_main
    except ModuleNotFoundError:
        print("the site needs Sphinx: pip install --editable '.[docs]'", file=sys.stderr)
        return 2
    out = Path(arguments[0] if arguments else "site")
    options = ["-W", "--keep-going", "-q", "-b", "html", "-d", str(out / ".doctrees")]
    code = int(build_main([*options, str(HERE), str(out)]))
    if code == 0:
        print(f"{out / 'index.html'}: no warning")
    return code


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
