"""Segments: the stored objects of the log, written and read. The bytes are in ``handles/FORMAT.md``."""
