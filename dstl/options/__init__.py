"""Options of DSTL: frozen values from keyword arguments, the environment (``DSTL_*``) and Spark's configuration
(``spark.dstl.*``). Each says what it trades for what; Flink's name stands beside ours where there is one."""

from dstl.options.changelog import (
    BatchingOptions,
    HedgingOptions,
    UploadOptions,
)
from dstl.options.processes import (
    ClusterOptions,
    MemoryOptions,
    MetricsOptions,
    S3Options,
    SealingOptions,
    WorkerOptions,
)
from dstl.options.state import (
    CheckpointOptions,
    MaterializationOptions,
    RocksDBOptions,
    TriggerOptions,
    check_grace,
)

__all__ = [
    "BatchingOptions",
    "CheckpointOptions",
    "ClusterOptions",
    "HedgingOptions",
    "MaterializationOptions",
    "MemoryOptions",
    "MetricsOptions",
    "RocksDBOptions",
    "S3Options",
    "SealingOptions",
    "TriggerOptions",
    "UploadOptions",
    "WorkerOptions",
    "check_grace",
]
