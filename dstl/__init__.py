"""DSTL: a durable short-term log as the state backend of PySpark Structured Streaming."""

__all__: list[str] = []
