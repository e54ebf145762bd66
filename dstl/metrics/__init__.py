"""Metrics: a recorder's three methods, the registry of all that are recorded, and samples of them that can travel."""

from dstl.metrics.recorder import Distribution, MetricSet, NullRecorder, Recorder, Sample

__all__ = ["Distribution", "MetricSet", "NullRecorder", "Recorder", "Sample"]
