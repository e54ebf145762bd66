"""The configuration that a coordinator gives each TaskManager when it enlists. It holds no secret."""

from __future__ import annotations

from pydantic import ConfigDict, TypeAdapter
from pydantic.dataclasses import dataclass

from dstl.options import (
    BatchingOptions,
    HedgingOptions,
    MaterializationOptions,
    S3Options,
    SealingOptions,
    UploadOptions,
)
from materializer.tables import TableKind

__all__ = ["TaskManagerConfig"]


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class TaskManagerConfig:
    """Configures the TaskManagers of one application, all of them alike.

    Attributes:
        location: Where state is stored.
        table: ``heap`` or ``rocksdb``.
        max_parallelism: Number of key groups.
        batching: When the log is sealed.
        upload: How objects get into the store.
        hedging: When a second request is sent.
        materialization: When tables are written as base files.
        s3: How S3 is reached; credentials come from the provider chain of the TaskManager's own host.
        sealing: Where the TaskManager's own host has the key that objects are sealed with.
    """

    location: str
    table: TableKind = "heap"
    max_parallelism: int = 128
    batching: BatchingOptions = BatchingOptions()
    upload: UploadOptions = UploadOptions()
    hedging: HedgingOptions = HedgingOptions()
    materialization: MaterializationOptions = MaterializationOptions()
    s3: S3Options = S3Options()
    sealing: SealingOptions = SealingOptions()

    def to_json(self) -> bytes:
        """Return it as JSON."""
        return _JSON.dump_json(self)

    @staticmethod
    def from_json(data: bytes) -> TaskManagerConfig:
        """Rebuild a configuration; the inverse of :meth:`to_json`.

        Raises:
            ValueError: It is none.
        """
        return _JSON.validate_json(data)


_JSON = TypeAdapter(TaskManagerConfig)
