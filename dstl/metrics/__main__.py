"""The reference of metrics, printed: ``python -m dstl.metrics``."""

from dstl.metrics.registry import reference

print(reference())
