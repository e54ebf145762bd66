"""The materialized part of an operator's state: base files that tables are loaded from before the log is replayed.

One base file holds many key groups back to back, so that a materialization costs few objects; a part of it is one key
group, whole and readable by itself. A base is *valid at* a checkpoint: it equals the table at that moment, and only
what was logged by later checkpoints is replayed on top.

A table that lies in files (RocksDB) may be stored as those files instead: the handle then names a small *index* and the
table's files, and bases of several checkpoints name the same file once more instead of storing it again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Annotated, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, model_validator

from handles.key_group import KeyGroup, KeyGroupRange
from handles.operator_uid import OperatorUid

__all__ = ["KeyGroupBase", "MaterializationReport", "MaterializedStateHandle", "TableFile"]

_Count = Annotated[int, Field(ge=0)]
_FileId = Annotated[str, Field(pattern=r"^[0-9a-f]{16}-[0-9]{1,20}\.sst$")]


class TableFile(NamedTuple):
    """A file of a table that never changes, stored as an object of its own; several bases may name it.

    Attributes:
        id: ``<table incarnation>-<file name>``: equal ids are equal bytes.
        name: Object name relative to the store's location.
        size: Length in bytes.
        checksum: CRC-32C.
    """

    id: _FileId
    name: str
    size: _Count
    checksum: _Count

    @property
    def file_name(self) -> str:
        """The table's name for it."""
        return self.id.partition("-")[2]


class MaterializedStateHandle(BaseModel):
    """Key groups of one operator in one base file that are all valid at the same checkpoint.

    Attributes:
        operator: The operator's uid.
        materialization_id: Which materialization wrote the file; grows with every one of an operator's key group.
        checkpoint: The checkpoint at which the parts are the operator's whole state of their key groups. It moves on
            while a key group does not change, without a new file.
        name: Object name relative to the store's location.
        size: Length of the object in bytes.
        checksum: CRC-32C of the object.
        parts: ``(key group, offset, length)`` of each part that is still of use, ascending by key group. Of a table in
            files they are no places but shares of ``total_size``, for estimates: its key groups share the files.
        files: The files of a table that is stored as it lies; ``name`` is then the index that belongs to them. Empty
            for a base file of key groups.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    operator: OperatorUid
    materialization_id: _Count
    checkpoint: _Count
    name: str
    size: _Count
    checksum: _Count
    parts: tuple[tuple[_Count, _Count, _Count], ...]
    files: tuple[TableFile, ...] = ()

    @model_validator(mode="after")
    def _inside(self) -> MaterializedStateHandle:
        groups = [part[0] for part in self.parts]
        if not groups or groups != sorted(set(groups)):
            raise ValueError(f"base file {self.name} lists no key group, one twice, or not in order")
        total = self.total_size
        if any(offset + length > total for _, offset, length in self.parts):
            raise ValueError(f"base file {self.name} of {total} bytes has a part that reaches beyond its end")
        names = {self.name, *(file.name for file in self.files)}
        if len(names) != 1 + len(self.files) or len({file.file_name for file in self.files}) != len(self.files):
            raise ValueError(f"base file {self.name} lists a table file twice")
        return self

    @property
    def total_size(self) -> int:
        """Bytes of the object, or of the index and the files together."""
        return self.size + sum(file.size for file in self.files)

    def sizes(self) -> Iterator[tuple[str, int]]:
        """Yield the names and lengths of the objects that the handle needs."""
        yield self.name, self.size
        for file in self.files:
            yield file.name, file.size

    @property
    def first_key_group(self) -> KeyGroup:
        """The lowest key group of the parts."""
        return self.parts[0][0]

    @property
    def last_key_group(self) -> KeyGroup:
        """The highest key group of the parts; not all in between need be there."""
        return self.parts[-1][0]

    def objects(self) -> Iterator[str]:
        """Yield the names of the objects that the handle needs."""
        yield self.name
        for file in self.files:
            yield file.name

    def bases(self) -> Iterator[KeyGroupBase]:
        """Yield the parts one by one."""
        for key_group, offset, length in self.parts:
            yield KeyGroupBase(
                self.operator,
                key_group,
                self.checkpoint,
                self.materialization_id,
                self.name,
                self.size,
                self.checksum,
                offset,
                length,
                self.files,
            )


@dataclass(frozen=True, slots=True)
class KeyGroupBase:
    """One key group in one base file.

    Attributes:
        operator: The operator's uid.
        key_group: The key group.
        checkpoint: Valid at this checkpoint.
        materialization_id: Which materialization wrote it.
        name: The object.
        object_size: Length of the object in bytes.
        object_checksum: CRC-32C of the object.
        offset: Where the part begins in it.
        length: Length of the part in bytes.
        files: Of a table in files: see :class:`MaterializedStateHandle`.
    """

    operator: str
    key_group: KeyGroup
    checkpoint: int
    materialization_id: int
    name: str
    object_size: int
    object_checksum: int
    offset: int
    length: int
    files: tuple[TableFile, ...] = ()

    @property
    def total_size(self) -> int:
        """Bytes of all objects that the base lies in."""
        return self.object_size + sum(file.size for file in self.files)

    def objects(self) -> Iterator[str]:
        """Yield the names of the objects that the base lies in."""
        yield self.name
        for file in self.files:
            yield file.name


class MaterializationReport(BaseModel):
    """The report of a TaskManager on one finished materialization of one operator.

    Invariants:
        1. Every key group of the range is in ``unchanged``, or in ``handles``, or in both (a second copy).

    Attributes:
        operator: The operator's uid.
        checkpoint: The checkpoint whose state was written.
        first_key_group: Lowest key group that the TaskManager owns.
        last_key_group: Highest, included.
        handles: The new files, valid at ``checkpoint``.
        unchanged: Key groups whose newest base before this one is still what the table holds, so it is valid at
            ``checkpoint`` too, each with that base's ``materialization_id``. Ascending.
        damaged: Objects that a restore has found damaged or missing: no generation may rely on them.
        reused: Objects of ``handles`` that an earlier materialization has stored and that a base of the checkpoint
            before still names: not this one's to delete.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    operator: OperatorUid
    checkpoint: _Count
    first_key_group: _Count
    last_key_group: _Count
    handles: tuple[MaterializedStateHandle, ...] = ()
    unchanged: tuple[tuple[_Count, _Count], ...] = ()
    damaged: tuple[str, ...] = ()
    reused: tuple[str, ...] = ()

    @model_validator(mode="after")
    def _whole(self) -> MaterializationReport:
        if any(h.operator != self.operator or h.checkpoint != self.checkpoint for h in self.handles):
            raise ValueError(f"a materialization of {self.operator} at {self.checkpoint} reports another's file")
        told = {part[0] for handle in self.handles for part in handle.parts} | {group for group, _ in self.unchanged}
        if told != set(self.key_groups):
            raise ValueError(f"a materialization of {self.operator} does not cover exactly {self.key_groups}")
        return self

    @property
    def key_groups(self) -> KeyGroupRange:
        """The key groups that it covers, inclusive at both ends."""
        return KeyGroupRange(self.first_key_group, self.last_key_group)

    @property
    def bytes(self) -> int:
        """Bytes of the new objects."""
        return sum(size for _, size in self._stored())

    def objects(self) -> Iterable[str]:
        """Return the names of the new objects."""
        return [name for name, _ in self._stored()]

    def _stored(self) -> Iterator[tuple[str, int]]:
        reused = set(self.reused)
        return (each for handle in self.handles for each in handle.sizes() if each[0] not in reused)
