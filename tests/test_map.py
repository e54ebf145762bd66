"""The map of the house (DESIGN section 4) beside the tree, the direction of imports, and the reasons of constants."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROOMS = ("dstl", "materializer", "handles", "tests/simulation")


def _packages() -> set[str]:
    return {f"{init.parent.relative_to(ROOT)}/" for room in ROOMS for init in (ROOT / room).rglob("__init__.py")}


def _map() -> list[tuple[str, str]]:
    design = (ROOT / "dstl" / "DESIGN.md").read_text()
    block = design.split("## 4. Layout and layers")[1].split("```")[1]
    return re.findall(r"^(\S+/) +(\S.*)$", block, re.MULTILINE)


def test_the_map_has_one_line_for_each_room_and_shelf() -> None:
    rooms = [room for room, _ in _map()]
    assert sorted(rooms) == sorted(_packages())


def test_no_python_file_lies_outside_the_rooms() -> None:
    files = {f"{path.parent.relative_to(ROOT)}/" for room in ROOMS for path in (ROOT / room).rglob("*.py")}
    assert files == _packages()


PACKAGES = ("dstl", "materializer", "handles")


def imports_of(root: Path, packages: tuple[str, ...]) -> dict[str, set[str]]:
    """Return which modules each module names in an import statement, wherever it stands."""
    files = {_module(path.relative_to(root)): path for package in packages for path in (root / package).rglob("*.py")}
    return {
        module: {each for each in _imported(ast.parse(path.read_text(encoding="utf-8")), files) if each != module}
        for module, path in files.items()
    }


def _module(path: Path) -> str:
    return ".".join(path.with_suffix("").parts).removesuffix(".__init__")


def _imported(tree: ast.Module, known: Mapping[str, Path]) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                # A name of a package is a module of it, or something that the package itself holds.
                inner = f"{node.module}.{alias.name}"
                yield from (name for name in (inner if inner in known else node.module,) if name in known)


def circle_in(imports: Mapping[str, set[str]]) -> list[str]:
    """Return modules of which each imports the next and the last the first; empty where there are none."""
    done: set[str] = set()
    path: list[str] = []

    def visit(module: str) -> list[str]:
        if module in path:
            return path[path.index(module) :]
        if module in done:
            return []
        path.append(module)
        for each in sorted(imports[module]):
            if circle := visit(each):
                return circle
        done.add(path.pop())
        return []

    return next((circle for module in sorted(imports) if (circle := visit(module))), [])


def test_no_modules_import_each_other_in_a_circle() -> None:
    imports = imports_of(ROOT, PACKAGES)
    assert len(imports) > 200, "the modules were not found"
    assert circle_in(imports) == []


@pytest.mark.parametrize(
    "line",
    [
        "from pack.b import thing",
        "import pack.b",
        "from pack import b",
        "if TYPE_CHECKING:\n    from pack.b import thing",
        "def later():\n    from pack.b import thing",
    ],
)
def test_a_circle_is_found_however_it_is_imported(line: str, tmp_path: Path) -> None:
    package = tmp_path / "pack"
    (package / "inner").mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "a.py").write_text(line)
    (package / "b.py").write_text("from pack.inner.c import x")
    (package / "inner" / "c.py").write_text("")
    assert circle_in(imports_of(tmp_path, ("pack",))) == []
    (package / "inner" / "c.py").write_text("from pack.a import y")
    assert circle_in(imports_of(tmp_path, ("pack",))) == ["pack.a", "pack.b", "pack.inner.c"]


def is_number(node: ast.expr) -> bool:
    parts = (ast.Constant, ast.operator, ast.unaryop, ast.BinOp, ast.UnaryOp)
    numbers = [type(part.value) in (int, float) for part in ast.walk(node) if isinstance(part, ast.Constant)]
    return any(numbers) and all(isinstance(part, parts) for part in ast.walk(node))


def test_every_numeric_constant_has_a_comment_or_docstring() -> None:
    paths = [p for name in ("dstl", "materializer", "handles") for p in (ROOT / name).rglob("*.py")]
    for path in paths:
        lines, body = path.read_text().splitlines(), ast.parse(path.read_text()).body
        for node, after in zip(body, [*body[1:], ast.Pass()], strict=True):
            if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None and is_number(node.value):
                before, own = lines[node.lineno - 2 : node.lineno]
                has_comment = "#" in own or before.startswith("#")
                is_documented = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
                assert has_comment or is_documented or "." in ast.unparse(node).split(" = ")[0], ast.unparse(node)
