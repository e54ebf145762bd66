"""Bases of each key group, newest first: pure, the same for the coordinator and the TaskManagers.

Two generations are kept, in different objects, and the log is kept back to the older one: a damaged base costs time,
not the job (Flink keeps one). A key group that no longer changes has the same content in both generations, and both
stay valid as checkpoints go by; so an idle key group costs two files and no log. A table that is stored in its own
files keeps the rule by taking turns: a base names again what the generation that it displaces has stored, never what
stays beside it (:func:`reusable_files`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from handles.key_group import KeyGroup
from handles.materialized_handle import KeyGroupBase, MaterializationReport, MaterializedStateHandle, TableFile

__all__ = ["Generations", "advance", "generations_of", "handles_of", "live_bytes", "reusable_files"]

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
            if not bases or bases[0].materialization_id != unchanged[group]:
                raise ValueError(
                    f"key group {group} of {report.operator} is reported unchanged since materialization "
                    f"{unchanged[group]}, which is not its newest base"
                )
            # An older generation with another content stays where it is.
            newest = bases[0].checkpoint
            bases = tuple(replace(b, checkpoint=report.checkpoint) if b.checkpoint == newest else b for b in bases)
        sound = tuple(base for base in bases if damaged.isdisjoint(base.objects()))
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
        sound = [base for base in bases if unsound.isdisjoint(base.objects())]
        for base in sound[: keep - 1]:
            stays.update(base.objects())
        for base in bases:
            leaves.update((file.name, file) for file in base.files)
    return {file.id: file for name, file in leaves.items() if name not in stays and name not in unsound}


def handles_of(generations: Mapping[str, Generations]) -> tuple[MaterializedStateHandle, ...]:
    """Return the bases as handles, one per file and checkpoint, in a fixed order."""
    files: dict[tuple[str, int, int, str], list[KeyGroupBase]] = {}
    for operator in sorted(generations):
        for bases in generations[operator].values():
            for base in bases:
                key = (operator, -base.checkpoint, -base.materialization_id, base.name)
                files.setdefault(key, []).append(base)
    return tuple(
        MaterializedStateHandle(
            operator=parts[0].operator,
            materialization_id=parts[0].materialization_id,
            checkpoint=parts[0].checkpoint,
            name=parts[0].name,
            size=parts[0].object_size,
            checksum=parts[0].object_checksum,
            parts=tuple(sorted((b.key_group, b.offset, b.length) for b in parts)),
            files=parts[0].files,
        )
        for _, parts in sorted(files.items())
    )


def live_bytes(generations: Iterable[Sequence[KeyGroupBase]]) -> dict[str, int]:
    """Return how many bytes of each object are still of use; of a table in files, by its index."""
    live: dict[str, int] = {}
    for bases in generations:
        for base in bases:
            live[base.name] = live.get(base.name, 0) + base.length
    return live


def _age(base: KeyGroupBase) -> tuple[int, int]:
    return -base.checkpoint, -base.materialization_id
