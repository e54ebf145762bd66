"""The configuration that a coordinator gives each TaskManager when it enlists. It holds no secret."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Self

from pydantic import BaseModel, ConfigDict, TypeAdapter
from pydantic.dataclasses import dataclass

from dstl.option_sources import SECTIONS, resolve
from dstl.options import (
    BatchingOptions,
    HedgingOptions,
    MaterializationOptions,
    MemoryOptions,
    RocksDBOptions,
    S3Options,
    SealingOptions,
    UploadOptions,
)
from materializer.tables import TableKind


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
        memory: What it may take.
        rocksdb: Bounds of RocksDB tables.
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
    memory: MemoryOptions = MemoryOptions()
    rocksdb: RocksDBOptions = RocksDBOptions()

    @staticmethod
    def resolve(
        location: str,
        table: TableKind,
        max_parallelism: int,
        given: Mapping[str, BaseModel | None],
        environment: Mapping[str, str],
        spark_conf: Mapping[str, str],
    ) -> TaskManagerConfig:
        """Return a configuration whose options come from their sources (:mod:`dstl.option_sources`).

        Args:
            location: Where state is stored.
            table: ``heap`` or ``rocksdb``.
            max_parallelism: Number of key groups.
            given: The sections that the user may have given, by name.
            environment: The process's environment.
            spark_conf: Spark's configuration.

        Raises:
            Invalid: An option is misspelt or out of range.
        """
        sections = {
            each.name: resolve(each.name, SECTIONS[each.name], given.get(each.name), environment, spark_conf)
            for each in fields(TaskManagerConfig)
            if each.name in SECTIONS
        }
        return TaskManagerConfig(location, table, max_parallelism, **sections)  # type: ignore[arg-type]

    def to_json(self) -> bytes:
        """Return it as JSON."""
        return TypeAdapter(type(self)).dump_json(self)

    @classmethod
    def from_json(cls, data: bytes) -> Self:
        """Rebuild a configuration; the inverse of :meth:`to_json`.

        Raises:
            ValueError: It is not a configuration.
        """
        return TypeAdapter(cls).validate_json(data)
