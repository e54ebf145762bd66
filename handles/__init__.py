"""The parts of checkpoints: pure frozen values, no I/O."""

DISTRIBUTION = "dstl-pyspark"
"""What brings this package: others have one of this name, and ``import dstl`` tells them apart by it."""
