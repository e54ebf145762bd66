"""State of Spark's own ``transformWithState``, on its way to ``StateBackend``."""
