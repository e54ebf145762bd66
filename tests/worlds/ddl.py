"""Schemas for tests without Spark."""

from __future__ import annotations

from dstl.state.descriptor import DeclaredSchemas
from dstl.testing.ddl import parse_ddl


def schemas_of_tests() -> DeclaredSchemas:
    """Return what reads the schemas of a processor under test."""
    return DeclaredSchemas(parse_ddl)
