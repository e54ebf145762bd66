"""The materialized part of an operator's state: base files that tables are loaded from before the log is replayed.

One base file holds many key groups back to back, so that a materialization costs few objects; a part of it is one key
group, whole and readable by itself. A base is *valid at* a checkpoint: it equals the table at that moment, and only
what was logged by later checkpoints is replayed on top.

A table that lies in files (RocksDB) may be stored as those files instead: the handle then names a small *index* and the
table's files, and bases of several checkpoints name the same file once more instead of storing it again.

Two generations are kept, in different objects, and the log is kept back to the older one: a damaged base costs time,
not the job (Flink keeps one). A key group that no longer changes has the same content in both generations, and both
stay valid as checkpoints go by; so an idle key group costs two files and no log. A table that is stored in its own
files keeps the rule by taking turns: a base names again what the generation that it displaces has stored, never what
stays beside it (:func:`reusable_files`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, model_validator

from handles.key_group import KeyGroup, KeyGroupRange
from handles.operator_uid import GRAMMAR

OperatorUid = Annotated[str, Field(pattern=f"^{GRAMMAR}$")]
"""An operator's uid."""

Count = Annotated[int, Field(ge=0)]
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
    size: Count
    checksum: Count

    @property
    def file_name(self) -> str:
        """The table's name for it."""
        return self.id.partition("-")[2]


class Frozen(BaseModel):
    """A value of a record: it has no other fields, and none that changes."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class MaterializedStateHandle(Frozen):
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

    operator: OperatorUid
    materialization_id: Count
    checkpoint: Count
    name: str
    size: Count
    checksum: Count
    parts: tuple[tuple[Count, Count, Count], ...]
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

    def objects(self) -> Iterator[str]:
        """Return the names of the objects that the handle needs."""
        return (name for name, _ in self.sizes())

    def bases(self) -> Iterator[KeyGroupBase]:
        """Yield the parts one by one."""
        for key_group, offset, length in self.parts:
            yield KeyGroupBase(self, key_group, self.checkpoint, offset, length)


@dataclass(frozen=True, slots=True)
class KeyGroupBase:
    """One key group in one base file.

    Attributes:
        file: The base file.
        key_group: The key group.
        checkpoint: Valid at this checkpoint: the file's, or a later one until which the key group has not changed.
        offset: Where the part begins in the object.
        length: Length of the part in bytes.
    """

    file: MaterializedStateHandle
    key_group: KeyGroup
    checkpoint: int
    offset: int
    length: int


class WithKeyGroups(Frozen):
    """A part of a checkpoint that is of some neighbouring key groups.

    Attributes:
        first_key_group: The lowest.
        last_key_group: The highest, included.
    """

    first_key_group: Count
    last_key_group: Count

    @property
    def key_groups(self) -> KeyGroupRange:
        """The key groups as a range, inclusive at both ends."""
        return KeyGroupRange(self.first_key_group, self.last_key_group)


class MaterializationReport(WithKeyGroups):
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

    operator: OperatorUid
    checkpoint: Count
    handles: tuple[MaterializedStateHandle, ...] = ()
    unchanged: tuple[tuple[Count, Count], ...] = ()
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
    def bytes(self) -> int:
        """Bytes of the new objects."""
        return sum(size for _, size in self._stored())

    def objects(self) -> Iterable[str]:
        """Return the names of the new objects."""
        return [name for name, _ in self._stored()]

    def _stored(self) -> Iterator[tuple[str, int]]:
        reused = set(self.reused)
        return (each for handle in self.handles for each in handle.sizes() if each[0] not in reused)


Generations = dict[KeyGroup, tuple[KeyGroupBase, ...]]
"""Per key group of one operator, its bases: the newest first, never empty."""


def generations_of(handles: Iterable[MaterializedStateHandle]) -> dict[str, Generations]:
    """Return the bases of each operator's key groups."""
    found: dict[str, dict[KeyGroup, list[KeyGroupBase]]] = {}
    for handle in handles:
        of_operator = found.setdefault(handle.operator, {})
        for base in handle.bases():
            of_operator.setdefault(base.key_group, []).append(base)
    return {
        operator: {group: tuple(sorted(bases, key=_age)) for group, bases in groups.items()}
        for operator, groups in found.items()
    }


def advance(known: Generations, report: MaterializationReport, keep: int) -> Generations:
    """Return an operator's bases after a finished materialization.

    Args:
        known: Before it; may be of more key groups than the report's.
        report: Of the materialization.
        keep: Generations to keep.

    Raises:
        ValueError: A key group is called unchanged since a base that is not its newest.
    """
    fresh = {base.key_group: base for handle in report.handles for base in handle.bases()}
    damaged, unchanged = set(report.damaged), dict(report.unchanged)
    after = dict(known)
    for group in report.key_groups:
        bases = known.get(group, ())
        if group in unchanged:
            if not bases or bases[0].file.materialization_id != unchanged[group]:
                raise ValueError(
                    f"key group {group} of {report.operator} is reported unchanged since materialization "
                    f"{unchanged[group]}, which is not its newest base"
                )
            # An older generation with another content stays where it is.
            newest = bases[0].checkpoint
            bases = tuple(replace(b, checkpoint=report.checkpoint) if b.checkpoint == newest else b for b in bases)
        sound = tuple(base for base in bases if damaged.isdisjoint(base.file.objects()))
        kept = ((fresh[group], *sound) if group in fresh else sound)[:keep]
        if kept:
            after[group] = kept
        else:
            after.pop(group, None)
    return after


def reusable_files(known: Generations, damaged: Iterable[str], keep: int) -> dict[str, TableFile]:
    """Return, by id, the stored table files that a new base of all these key groups may name.

    They are those of the bases that it displaces, so that the generations which stay have no object in common with it.

    Args:
        known: The operator's bases.
        damaged: Objects that no generation may rely on.
        keep: Generations to keep, the new one included.
    """
    unsound = set(damaged)
    stays: set[str] = set()
    leaves: dict[str, TableFile] = {}
    for bases in known.values():
        sound = [base for base in bases if unsound.isdisjoint(base.file.objects())]
        for base in sound[: keep - 1]:
            stays.update(base.file.objects())
        for base in bases:
            leaves.update((file.name, file) for file in base.file.files)
    return {file.id: file for name, file in leaves.items() if name not in stays and name not in unsound}


def handles_of(generations: Mapping[str, Generations]) -> tuple[MaterializedStateHandle, ...]:
    """Return the bases as handles, one per file and checkpoint, in a fixed order."""
    files: dict[tuple[str, int, int, str], list[KeyGroupBase]] = {}
    for operator in sorted(generations):
        for bases in generations[operator].values():
            for base in bases:
                files.setdefault((operator, *_age(base), base.file.name), []).append(base)
    return tuple(
        bases[0].file.model_copy(
            update={
                "checkpoint": bases[0].checkpoint,
                "parts": tuple(sorted((base.key_group, base.offset, base.length) for base in bases)),
            }
        )
        for _, bases in sorted(files.items())
    )


def live_bytes(generations: Iterable[Sequence[KeyGroupBase]]) -> dict[str, int]:
    """Return how many bytes of each object are still of use; of a table in files, by its index."""
    live: dict[str, int] = {}
    for bases in generations:
        for base in bases:
            live[base.file.name] = live.get(base.file.name, 0) + base.length
    return live


def _age(base: KeyGroupBase) -> tuple[int, int]:
    return -base.checkpoint, -base.file.materialization_id
