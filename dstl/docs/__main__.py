"""Builds the site: ``python -m dstl.docs [DIRECTORY]`` writes it to ``site/``; a warning is an error.

Beside each page is its Markdown, and ``llms-full.txt`` has all of it but the decisions.
"""

from __future__ import annotations

import sys
from pathlib import Path

from dstl.docs.markdown import write_markdown

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
        write_markdown(HERE, out)
        print(f"{out / 'index.html'}: no warning")
    return code


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
