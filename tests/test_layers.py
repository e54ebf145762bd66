"""Modules import each other in one direction: no circle, not even one of imports for types or inside functions."""

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
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
