"""``python -m bench NAME ...`` runs ``bench.NAME.main``; ``python -m bench`` lists the names.

With ``--out FILE`` the figures of any benchmark go to a file as JSON, together with the command and the machine:
``python -m bench report`` draws them.
"""

import ast
import contextlib
import importlib
import io
import json
import pkgutil
import sys
from pathlib import Path

from bench._stamp import stamp

_HERE = Path(__file__).parent


def names() -> dict[str, str]:
    """Return the benchmarks, the modules of this package that have a ``main``, and a line on each."""
    found = {}
    for module in pkgutil.iter_modules([str(_HERE)]):
        if module.name.startswith("_"):
            continue
        text = (_HERE / f"{module.name}.py").read_text(encoding="utf-8")
        if "def main(" in text:
            first = (ast.get_docstring(ast.parse(text)) or "").partition("\n")[0]
            found[module.name] = first.removeprefix(f"``{module.name}``: ")
    return dict(sorted(found.items()))


def main(argv: list[str]) -> int:
    """Run one benchmark and return its exit code."""
    known = names()
    if not argv or argv[0] in {"-h", "--help"} or argv[0] not in known:
        asked = bool(argv) and argv[0] in {"-h", "--help"}
        to = sys.stdout if asked else sys.stderr
        print("usage: python -m bench NAME [--json | --out FILE] ...; NAME --help says more\n", file=to)
        for name, line in known.items():
            print(f"  {name:16} {line}", file=to)
        return 0 if asked else 2
    name, arguments, out = argv[0], argv[1:], None
    if "--out" in arguments and name != "report":
        at = arguments.index("--out")
        if at + 1 == len(arguments):
            print("--out needs the name of a file", file=sys.stderr)
            return 2
        out = Path(arguments[at + 1])
        del arguments[at : at + 2]
    run = importlib.import_module(f"bench.{name}").main
    if out is None:
        return int(run(arguments) or 0)
    stamped, said = stamp(name, arguments), io.StringIO()
    with contextlib.redirect_stdout(said):
        code = int(run([*arguments, *(["--json"] if "--json" not in arguments else [])]) or 0)
    if code == 0:
        stamped["figures"] = json.loads(said.getvalue().splitlines()[-1])
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(stamped, indent=1) + "\n", encoding="utf-8")
        print(f"wrote {out}", file=sys.stderr)
    return code


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
