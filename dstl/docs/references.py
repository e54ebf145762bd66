"""References made from the code: options, commands, metrics. Markdown that takes the place of a mark in a page."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator, Mapping
from typing import Any

import typer
from pydantic import BaseModel

from dstl.cli import application
from dstl.metrics import registry
from dstl.option_sources import SECTIONS

_ROLE = re.compile(r":\w+:`~?([^`]+)`")
_CODE = re.compile(r"``([^`]+)``")
_EXIT_CODES = re.compile(r"\s*Exit codes:.*", re.DOTALL)


def option_reference() -> str:
    """Return every option as Markdown: its names, default, range, and both sides of its trade-off."""
    return "\n".join(line for section, kind in SECTIONS.items() for line in _section(section, kind))


def command_reference() -> str:
    """Return every command of ``dstl`` as Markdown."""
    root = typer.main.get_command(application())
    return "\n".join(_commands("dstl", root))


def metric_reference() -> str:
    """Return the metrics as Markdown, as their registry writes them."""
    # Without its own title: the page has one.
    return registry.reference().partition("\n## ")[2].join(("## ", ""))


def _section(section: str, kind: type[BaseModel]) -> Iterator[str]:
    texts = _attribute_texts(kind)
    yield f"## {section}\n"
    yield f"`{kind.__name__}`: {_markdown(inspect.getdoc(kind) or '')}\n"
    yield (
        f"`StateBackend({section}={kind.__name__}(...))`, `spark.dstl.{section}.NAME`, or "
        f"`DSTL_{section.upper()}_NAME`.\n"
    )
    for name, field in kind.model_fields.items():
        bounds = ", ".join(_bound(each) for each in field.metadata if _bound(each))
        shown = "none" if field.default is None else f"`{field.default!r}`"
        yield f"`{name}`"
        yield f": *{', '.join(filter(None, (_type(field.annotation), bounds)))}; default {shown}.*"
        yield f"  {_markdown(texts[name])}\n"


def _attribute_texts(kind: type[BaseModel]) -> Mapping[str, str]:
    """Return the docstring behind each field, those of the base classes included; Python itself forgets them."""
    found: dict[str, str] = {}
    for each in reversed([base for base in kind.__mro__ if issubclass(base, BaseModel) and base is not BaseModel]):
        (body,) = ast.parse(inspect.getsource(each)).body
        assert isinstance(body, ast.ClassDef)
        for field, text in zip(body.body, body.body[1:], strict=False):
            if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
                found[ast.unparse(field.target)] = inspect.cleandoc(str(text.value.value))
    return found


def _bound(constraint: Any) -> str:
    signs = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}
    for name, sign in signs.items():
        if hasattr(constraint, name):
            return f"{sign} {getattr(constraint, name):g}"
    return ""


def _type(annotation: Any) -> str:
    text = annotation.__name__ if isinstance(annotation, type) else str(annotation)
    return text.replace("typing.", "").replace("NoneType", "None").replace(" | None", " or none")


def _markdown(text: str) -> str:
    """Return a docstring's text without the marks of another language, as one paragraph."""
    return " ".join(_CODE.sub(r"`\1`", _ROLE.sub(r"`\1`", text)).split())


def _commands(path: str, command: Any) -> Iterator[str]:
    # Any: Typer brings a click of its own.
    inner: Mapping[str, Any] = getattr(command, "commands", {})
    if not inner:
        yield f"## {path}\n"
        yield f"{_markdown(_EXIT_CODES.sub('', command.help or ''))}\n"
        for parameter in command.params:
            names = "/".join((*parameter.opts, *parameter.secondary_opts))
            if parameter.param_type_name == "argument":
                names = (parameter.metavar or parameter.name or "").strip("[]")
            text = _markdown(getattr(parameter, "help", None) or "")
            known = parameter.default not in (None, False) and not callable(parameter.default) and "Default" not in text
            yield f"`{names}`"
            yield f": {text}{f' Default: `{parameter.default}`.' if known else ''}\n"
    for name, each in inner.items():
        yield from _commands(f"{path} {name}", each)


def setup(app: Any) -> dict[str, bool]:
    """Have Sphinx put each reference in its place in the pages; it calls this."""
    app.connect("source-read", lambda _, page, source: source.__setitem__(0, with_references(source[0])))
    return {"parallel_read_safe": True}


def with_references(page: str) -> str:
    """Return a page with the references for which it has a mark, such as ``<!-- reference: options -->``."""
    for name, make in _REFERENCES.items():
        mark = f"<!-- reference: {name} -->"
        if mark in page:
            page = page.replace(mark, make())
    return page


_REFERENCES = {"options": option_reference, "commands": command_reference, "metrics": metric_reference}
