"""What a TaskManager is told by its coordinator when it enlists. It holds no secret."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel

from dstl.options import BatchingOptions, HedgingOptions, MaterializationOptions, S3Options, UploadOptions
from materializer.tables import TableKind

__all__ = ["TaskManagerConfig"]

_SECTIONS: dict[str, type[BaseModel]] = {
    "batching": BatchingOptions,
    "upload": UploadOptions,
    "hedging": HedgingOptions,
    "materialization": MaterializationOptions,
    "s3": S3Options,
}


@dataclass(frozen=True)
class TaskManagerConfig:
    """How a TaskManager of one application works: the same for all of them.

    Attributes:
        location: Where state is stored.
        table: ``heap`` or ``rocksdb``.
        max_parallelism: Number of key groups.
        batching: When the log is sealed.
        upload: How objects get into the store.
        hedging: When a second request is sent.
        materialization: When tables are written as base files.
        s3: How S3 is reached; credentials come from the provider chain of the TaskManager's own host.
    """

    location: str
    table: TableKind = "heap"
    max_parallelism: int = 128
    batching: BatchingOptions = field(default_factory=BatchingOptions)
    upload: UploadOptions = field(default_factory=UploadOptions)
    hedging: HedgingOptions = field(default_factory=HedgingOptions)
    materialization: MaterializationOptions = field(default_factory=MaterializationOptions)
    s3: S3Options = field(default_factory=S3Options)

    def to_json(self) -> str:
        """Return it as JSON."""
        fields: dict[str, Any] = {name: getattr(self, name) for name in ("location", "table", "max_parallelism")}
        fields.update({name: getattr(self, name).model_dump(mode="json") for name in _SECTIONS})
        return json.dumps(fields)

    @staticmethod
    def from_json(text: str) -> TaskManagerConfig:
        """Rebuild a configuration; the inverse of :meth:`to_json`."""
        fields = json.loads(text)
        fields.update({name: kind.model_validate(fields[name]) for name, kind in _SECTIONS.items()})
        return TaskManagerConfig(**fields)
