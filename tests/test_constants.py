"""Numeric constants of a module say why they have their value."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parents[1]


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
