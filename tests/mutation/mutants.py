"""Mutants of a module: its source with one small thing changed, one mutant for each place and way."""

import ast
import copy
from collections.abc import Iterator

COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
}  # fmt: skip
OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult, ast.Div: ast.Mult,
    ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd, ast.LShift: ast.RShift, ast.RShift: ast.LShift, ast.Mod: ast.Mult,
}  # fmt: skip
NAMES = {"min": "max", "max": "min", "any": "all", "all": "any"}


def mutants_of(source: str) -> Iterator[tuple[str, str]]:
    """Yield a description, which names the line, and the source of each mutant."""
    tree = ast.parse(source)
    for number, node in enumerate(_nodes(tree)):
        for way, (what, _) in enumerate(_ways(node)):
            changed = copy.deepcopy(tree)
            place = list(_nodes(changed))[number]
            _replace(changed, place, _ways(place)[way][1])
            line = getattr(node, "lineno", 0)
            yield f"{line}: {what}", ast.unparse(ast.fix_missing_locations(changed))


def _nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """Walk over what runs in a function: no docstrings, annotations, decorators, messages of errors, asserts."""
    inside = [each for each in ast.walk(tree) if isinstance(each, (ast.FunctionDef, ast.AsyncFunctionDef))]
    seen: set[int] = set()
    for function in inside:
        for statement in function.body:
            for node in _within(statement):
                if id(node) not in seen:
                    seen.add(id(node))
                    yield node


def _within(node: ast.AST) -> Iterator[ast.AST]:
    if isinstance(node, (ast.Raise, ast.Assert, ast.FunctionDef, ast.AsyncFunctionDef)):
        return
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return
    yield node
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "ctx"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from _within(child)


def _ways(node: ast.AST) -> list[tuple[str, ast.AST]]:
    """Return how a node may be changed: a description and what stands there instead."""
    ways: list[tuple[str, ast.AST]] = []
    if isinstance(node, ast.Compare):
        for at, op in enumerate(node.ops):
            other = copy.deepcopy(node)
            other.ops[at] = COMPARISONS[type(op)]()
            ways.append((f"{ast.unparse(node)} -> {ast.unparse(other)}", other))
    elif isinstance(node, ast.BoolOp):
        swapped = ast.BoolOp(ast.Or() if isinstance(node.op, ast.And) else ast.And(), node.values)
        ways.append((f"{ast.unparse(node)} -> {ast.unparse(swapped)}", swapped))
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        ways.append((f"{ast.unparse(node)} -> without not", node.operand))
    elif isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        changed = ast.BinOp(node.left, OPERATORS[type(node.op)](), node.right)
        ways.append((f"{ast.unparse(node)} -> {ast.unparse(changed)}", changed))
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        ways.append((f"{node.value} -> {not node.value}", ast.Constant(not node.value)))
    elif isinstance(node, ast.Constant) and isinstance(node.value, (int, float)):
        ways.append((f"{node.value} -> {node.value + 1}", ast.Constant(node.value + 1)))
    elif isinstance(node, ast.Name) and node.id in NAMES:
        ways.append((f"{node.id} -> {NAMES[node.id]}", ast.Name(NAMES[node.id], ast.Load())))
    elif isinstance(node, (ast.If, ast.While, ast.IfExp)) and not isinstance(node.test, (ast.Compare, ast.Constant)):
        other_way = copy.copy(node)
        other_way.test = ast.UnaryOp(ast.Not(), node.test)
        ways.append((f"if not {ast.unparse(node.test)}", other_way))
    elif isinstance(node, ast.Return) and node.value is not None and ast.unparse(node.value) != "None":
        ways.append((f"{ast.unparse(node)} -> return None", ast.Return(ast.Constant(None))))
    elif isinstance(node, ast.AugAssign) or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)):
        ways.append((f"{ast.unparse(node)} -> pass", ast.Pass()))
    return ways


def _replace(tree: ast.AST, old: ast.AST, new: ast.AST) -> None:
    for node in ast.walk(tree):
        for name, value in ast.iter_fields(node):
            if value is old:
                setattr(node, name, new)
            elif isinstance(value, list):
                for at, each in enumerate(value):
                    if each is old:
                        value[at] = new
