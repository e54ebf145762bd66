"""Metrics: a recorder's three methods, the registry of all that are recorded, and samples of them that can travel."""

from dstl.metrics.recorder import MemoryRecorder, NullRecorder, Recorder
from dstl.metrics.sample import Distribution, MetricSet, Sample

__all__ = ["Distribution", "MemoryRecorder", "MetricSet", "NullRecorder", "Recorder", "Sample"]
