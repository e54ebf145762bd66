"""Journals of long simulations: what they have shown so far, so that they can be stopped and taken up again."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import dstl
import handles
import materializer
from dstl.errors import Invalid
from tests.simulation.audit import Violation
from tests.simulation.faults import FaultKind
from tests.simulation.runner import SeedResult
from tests.simulation.seeds import Summary

_EVERY = 100
_FIGURES = tuple(each.name for each in fields(Summary) if each.name not in ("failed", "faults"))


class JournalFile:
    """A file of JSON lines: the first says of which code, each other what was shown since.

    Lines are appended and flushed, so a run that is killed loses what it was at. Not for two writers at once.

    Args:
        path: The file; made where there is none.
        head: What the first line of a new one says besides.

    Attributes:
        head: What the first line says.
        lines: The others that were there.

    Raises:
        Invalid: The journal was written by other code, whose seeds mean something else, or it is no journal.
    """

    def __init__(self, path: Path, head: Mapping[str, object] = {}) -> None:
        self._path = path
        self.head: dict[str, Any] = {**head, "code": code_digest()}
        self.lines: list[dict[str, Any]] = []
        if not path.exists():
            self.append(self.head)
            return
        # The last may be torn, for its writer was killed.
        content = path.read_bytes()
        whole = content[: content.rfind(b"\n") + 1]
        try:
            found, *self.lines = map(json.loads, whole.splitlines())
            code, self.head = found["code"], {name: found[name] for name in self.head}
        except (KeyError, TypeError, ValueError) as error:
            raise Invalid(f"{path} is no journal of a simulation ({error!r}): name another file") from None
        if code != code_digest():
            raise Invalid(
                f"{path} was written by other code, and the same seed is another world now: name another file"
            )
        if whole != content:
            path.write_bytes(whole)

    def append(self, line: object) -> None:
        """Write a line."""
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line, separators=(",", ":")) + "\n")


class Journal:
    """The journal of a run over many seeds.

    Args:
        path: The file; made where there is none.
        start: The first seed of a new journal.
        seeds: The number of seeds of a new journal.

    Attributes:
        start: The first seed.
        seeds: The number of seeds.
        summary: What the seeds that are done have shown.

    Raises:
        Invalid: As of :class:`JournalFile`.
    """

    def __init__(self, path: Path, start: int, seeds: int) -> None:
        self.summary = Summary()
        self._new = Summary()
        self._file = JournalFile(path, {"start": start, "seeds": seeds})
        self.start, self.seeds = int(self._file.head["start"]), int(self._file.head["seeds"])
        for line in self._file.lines:
            self.summary.join(_summary_of(line))

    @property
    def left(self) -> range:
        """The seeds that are still to be run."""
        return range(self.start + self.summary.seeds, self.start + self.seeds)

    def add(self, result: SeedResult) -> None:
        """Take a seed in; seeds come in their order."""
        self._new.add(result)
        if self._new.seeds >= _EVERY or result.violations:
            self.flush()

    def flush(self, real_seconds: float = 0.0) -> None:
        """Write down what was taken in.

        Args:
            real_seconds: Seconds that the seeds took since the journal was opened; 0 while they run.
        """
        new, self._new = self._new, Summary()
        new.real_seconds = real_seconds
        if new.seeds or real_seconds:
            self.summary.join(new)
            self._file.append(_summary_line(new))


class PlacesJournal:
    """The journal of an enumeration: each line says what a fault at one place has shown.

    A line without a place says that a kind of fault has no more.

    Args:
        path: The file; made where there is none.

    Attributes:
        violations: Those of all places.

    Raises:
        Invalid: As of :class:`JournalFile`.
    """

    def __init__(self, path: Path) -> None:
        self.violations: list[str] = []
        self._places: Counter[tuple[str, str]] = Counter()
        self._ended: set[tuple[str, str]] = set()
        self._file = JournalFile(path)
        for line in self._file.lines:
            self._take(line)

    def places(self, where: str, what: FaultKind) -> int:
        """Return how many places of a fault were struck."""
        return self._places[where, str(what)]

    def has_all(self, where: str, what: FaultKind) -> bool:
        """Return True where a fault has no more places."""
        return (where, str(what)) in self._ended

    def add(self, where: str, what: FaultKind, nth: int, violations: Iterable[str]) -> None:
        """Take in what a fault at its next place has shown."""
        self._add({"where": where, "what": str(what), "nth": nth, "violations": list(violations)})

    def end(self, where: str, what: FaultKind) -> None:
        """Take in that a fault has no more places."""
        self._add({"where": where, "what": str(what), "nth": None, "violations": []})

    def _add(self, line: dict[str, Any]) -> None:
        self._take(line)
        self._file.append(line)

    def _take(self, line: dict[str, Any]) -> None:
        where, what, nth = line["where"], line["what"], line["nth"]
        if nth is None:
            self._ended.add((where, what))
            return
        self._places[where, what] = nth
        self.violations += [f"{what} at {where} {nth}: {each}" for each in line["violations"]]


def code_digest() -> str:
    """Return a digest of the product and its simulator: with another one a seed may be another world."""
    digest = hashlib.blake2b(digest_size=8)
    for root in (
        *(Path(str(package.__file__)).parent for package in (dstl, handles, materializer)),
        Path(__file__).parent,
    ):
        for path in sorted(root.rglob("*.py")):
            if not path.name.startswith(("test_", "detection", "mutants")):
                digest.update(f"{root.name}/{path.relative_to(root)}\n".encode())
                digest.update(path.read_bytes())
    return digest.hexdigest()


def _summary_line(summary: Summary) -> dict[str, object]:
    line: dict[str, object] = {name: getattr(summary, name) for name in _FIGURES}
    line["faults"] = {str(kind): number for kind, number in summary.faults.items()}
    line["failed"] = [{**asdict(each), "faults": {}, "trace": []} for each in summary.failed]
    return line


def _summary_of(line: dict[str, Any]) -> Summary:
    summary = Summary(**{name: line[name] for name in _FIGURES})
    summary.faults = Counter({FaultKind(kind): number for kind, number in line["faults"].items()})
    for each in line["failed"]:
        violations = tuple(Violation(**violation) for violation in each["violations"])
        summary.failed.append(SeedResult(**{**each, "violations": violations, "faults": Counter(), "trace": ()}))
    return summary
