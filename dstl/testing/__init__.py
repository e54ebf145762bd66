"""Shipped to users: a processor in a test, without Spark and without a store."""

from dstl.testing.ddl import parse_ddl
from dstl.testing.processor_tester import ProcessorTester

__all__ = ["ProcessorTester", "parse_ddl"]
