"""Schemas for tests without Spark."""

from __future__ import annotations

from dstl.state.declared_schemas import DeclaredSchemas
from dstl.testing.ddl import parse_ddl

__all__ = ["parse_ddl", "schemas_of_tests"]


def schemas_of_tests() -> DeclaredSchemas:
    """Return what reads the schemas of a processor under test."""
    return DeclaredSchemas(parse_ddl)
