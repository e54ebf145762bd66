"""Tables, their materialization and their recovery."""

DISTRIBUTION = "dstl-pyspark"
"""As ``handles.DISTRIBUTION``."""
