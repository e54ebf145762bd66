"""Spark's own checkpoint directories in DSTL's log: ``dstl://``."""
