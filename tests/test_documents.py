"""Names of modules, files, tests and options in documents and docstrings, compared with the tree."""

import ast
import re
import subprocess
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from pathlib import Path

import pytest

from dstl.option_sources import SECTIONS

ROOT = Path(__file__).parents[1]
DOCUMENTS = ("README.md", ".github/CONTRIBUTING.md", "dstl/DESIGN.md", "handles/FORMAT.md", "tests/KNOWN_BUGS.md")
ROOMS = ("dstl", "materializer", "handles")
OTHERS = {
    "AbortIncompleteMultipartUpload",
    "AnalysisException",
    "GenerateDataKey",
    "HashMapStateBackend",
    "Py4JJavaError",
    "PythonException",
    "bench.NAME.main",
    "dstl.checkpoints",
    "upload.timeout",
    "visits.py",
}
"""Names of Spark, Flink and S3, of a logger, a placeholder, and a reader's file."""
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
NAMED: dict[type[ast.AST], str] = {
    **dict.fromkeys((*DOCUMENTED[1:], ast.alias, ast.ExceptHandler), "name"),
    ast.Name: "id",
    ast.Attribute: "attr",
    ast.arg: "arg",
    ast.keyword: "arg",
    ast.Constant: "value",
}
"""The field of a node that is a word of the code."""

_TICKED = re.compile(r"``([^`\n]+)``|(?<!`)`([^`\n]+)`(?!`)")
_ROLE = re.compile(r":(?:mod|class|func|meth|data|attr):`(?:[^`<]*<)?~?([\w.]+)>?`")
_FILE = re.compile(r"[\w./-]+\.(?:py|md|toml|yml)")
_DOTTED = re.compile(rf"(?:{'|'.join(ROOMS)}|tests|bench)(?:\.\w+)+")
_TEST = re.compile(r"test_\w+")
_CLASS = re.compile(r"[A-Z][a-z0-9]+(?:[A-Z][a-z0-9]*)+")
_OPTION = re.compile(rf"(?:spark\.dstl\.)?({'|'.join(SECTIONS)})\.(\w+)")


def _tracked() -> set[str]:
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return {name for name in listed.splitlines() if (ROOT / name).exists()}


TREE = _tracked()
SOURCES = sorted(name for name in TREE if name.endswith(".py"))


@cache
def _tests() -> set[str]:
    sources = "\n".join((ROOT / name).read_text() for name in SOURCES if name.startswith("tests/"))
    return set(re.findall(r"^ *(?:async )?def (\w+)\(", sources, re.MULTILINE))


@cache
def _parsed(name: str) -> tuple[list[str], set[str], list[str]]:
    """Return a module's docstrings, the words of its code, strings included, and the titles of what it documents."""
    said, texts, titles = [], set(), []
    for node in ast.walk(ast.parse((ROOT / name).read_text())):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            said.append(node.value.value)
        elif isinstance(node, DOCUMENTED):
            titles.append((ast.get_docstring(node, clean=False) or "").partition("\n")[0])
        if (field := NAMED.get(type(node))) and isinstance(text := getattr(node, field), str):
            texts.add(text)
    return said, set(re.findall(r"\w+", "\n".join(texts.difference(said)))), titles


@cache
def _classes() -> set[str]:
    java = {Path(name).stem for name in TREE if name.endswith(".java")}
    return {word for name in SOURCES if not name.startswith("tests/") for word in _parsed(name)[1]} | OTHERS | java


def _texts() -> Iterator[tuple[str, str]]:
    for name in DOCUMENTS:
        yield name, (ROOT / name).read_text()
    for name in SOURCES:
        yield name, "\n".join(_parsed(name)[0])


def _missing(text: str, where: str = "") -> str | None:
    """Return the reason why a ticked name is not one of ours; None where it is one, or no name that we can know."""
    if text in OTHERS:
        return None
    if _FILE.fullmatch(text):
        beside = f"{where.rpartition('/')[0]}/{text}".removeprefix("/")
        if not any(name in (text, beside) or name.endswith(f"/{text}") for name in TREE):
            return "no such file"
    elif _DOTTED.fullmatch(text):
        return None if _exists(text) else "no such module or name"
    elif _TEST.fullmatch(text) and text not in _tests():
        if not any(name.endswith(f"/{text}.py") for name in TREE):
            return "no such test"
    elif _CLASS.fullmatch(text) and text not in _classes() and not where.startswith(("tests/", "bench/")):
        return "no such class"
    elif (option := _OPTION.fullmatch(text)) and option[2] not in SECTIONS[option[1]].model_fields:
        return "no such option"
    return None


def _exists(dotted: str) -> bool:
    """Return whether a dotted name is a module, or a name in one; modules of tests and benchmarks are not imported.

    A class of the JVM's part is one as well.
    """
    parts = dotted.split(".")
    if f"dstl/jvm/java/{'/'.join(parts)}.java" in TREE:
        return True
    for length in range(len(parts), 0, -1):
        path = "/".join(parts[:length])
        if f"{path}.py" in TREE or f"{path}/__init__.py" in TREE:
            rest = parts[length:]
            if not rest or parts[0] not in ROOMS:
                return not rest or len(rest) == 1
            found: object = import_module(".".join(parts[:length]))
            for each in rest:
                if not hasattr(found, each) and each not in getattr(found, "__annotations__", {}):
                    return each in getattr(found, "model_fields", {})
                found = getattr(found, each, None)
            return True
    return any(name.startswith("/".join(parts) + "/") for name in TREE)


def test_documents_and_docstrings_name_only_what_exists() -> None:
    wrong = []
    for where, text in _texts():
        names = [one or other for one, other in _TICKED.findall(text)] + _ROLE.findall(text)
        for name in dict.fromkeys(each.strip("()") for each in names):
            why = _missing(name, where)
            if why is not None:
                wrong.append(f"{where}: {name}: {why}")
    assert wrong == []


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("dstl/no_such_module.py", "no such file"),
        ("no_such_module.py", "no such file"),
        ("dstl.spark.no_such", "no such module or name"),
        ("dstl.errors.Invalid", None),
        ("dstl.spark.DstlPlugin", None),
        ("dstl.spark.NoSuchPlugin", "no such module or name"),
        ("dstl.options.BatchingOptions.segment_size", None),
        ("test_nobody_has_written", "no such test"),
        ("NoSuchHandle", "no such class"),
        ("MaterializedStateHandle", None),
        ("batching.segment_size", None),
        ("spark.dstl.batching.segment", "no such option"),
        ("murmur3", None),
    ],
)
def test_a_name_that_does_not_exist_is_found(name: str, why: str | None) -> None:
    assert _missing(name) == why


def test_no_docstring_begins_with_a_clause() -> None:
    clause = re.compile(r"(What|Where|Which|How|Who|When|Whether|Why)\b")
    wrong = []
    for name in SOURCES:
        for title in _parsed(name)[2] if name.startswith(ROOMS) else ():
            if clause.match(title):
                wrong.append(f"{name}: {title}")
    assert wrong == []
