"""Journals of long simulations: what they have shown so far, so that they can be stopped and taken up again."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, fields
from pathlib import Path

import dstl
import handles
import materializer
from dstl.errors import Invalid
from dstl.testing.simulation.audit import Violation
from dstl.testing.simulation.faults import FaultKind
from dstl.testing.simulation.runner import SeedResult, Summary

__all__ = ["Journal", "PlacesJournal", "code_digest"]

_EVERY = 100
_FIGURES = tuple(each.name for each in fields(Summary) if each.name not in ("failed", "faults"))


class Journal:
    """A file of JSON lines: the first says which seeds there are and of which code, each other what some have shown.

    Lines are appended and flushed, so a run that is killed loses its last seeds only. Not for two writers at once.

    Args:
        path: The file; made where there is none.
        start: The first seed of a new journal.
        seeds: The number of seeds of a new journal.
        one_commit: Whether Spark's commits are the checkpoints: the journal is of such seeds alone.

    Attributes:
        start: The first seed.
        seeds: The number of seeds.
        summary: What the seeds that are done have shown.

    Raises:
        Invalid: The journal was written by other code or in the other mode, whose seeds mean something else, or it is
            no journal.
    """

    def __init__(self, path: Path, start: int, seeds: int, *, one_commit: bool = False) -> None:
        self.start, self.seeds, self.summary = start, seeds, Summary()
        self._path = path
        self._one_commit = one_commit
        self._new = Summary()
        if path.exists():
            self._read()
            _end_line(path)
        else:
            self._append({"start": start, "seeds": seeds, **_head(one_commit)})

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
            self._append(_summary_line(new))

    def _append(self, line: object) -> None:
        _append(self._path, line)

    def _read(self) -> None:
        try:
            lines = _lines(self._path)
            head = next(lines)
            self.start, self.seeds = int(head["start"]), int(head["seeds"])  # type: ignore[call-overload]
            written = head["code"], head.get("one_commit")
            for line in lines:
                self.summary.join(_summary_of(line))
        except (StopIteration, KeyError, TypeError, ValueError) as error:
            raise Invalid(f"{self._path} is no journal of a simulation ({error!r}): name another file") from None
        _check_written(self._path, *written, self._one_commit)


class PlacesJournal:
    """A file of JSON lines: the first says of which code, each other what a fault at one place has shown.

    A line without a place says that a kind of fault has no more. As with :class:`Journal`, a run that is killed loses
    the place it was at; not for two writers at once.

    Args:
        path: The file; made where there is none.
        one_commit: As for :class:`Journal`.

    Attributes:
        violations: Those of all places.

    Raises:
        Invalid: As of :class:`Journal`.
    """

    def __init__(self, path: Path, *, one_commit: bool = False) -> None:
        self.violations: list[str] = []
        self._path = path
        self._one_commit = one_commit
        self._places: Counter[tuple[str, str]] = Counter()
        self._ended: set[tuple[str, str]] = set()
        if path.exists():
            self._read()
            _end_line(path)
        else:
            _append(path, _head(one_commit))

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

    def _add(self, line: dict[str, object]) -> None:
        self._take(line)
        _append(self._path, line)

    def _take(self, line: dict[str, object]) -> None:
        where, what, nth = str(line["where"]), str(line["what"]), line["nth"]
        if nth is None:
            self._ended.add((where, what))
            return
        self._places[where, what] = int(str(nth))
        self.violations += [f"{what} at {where} {nth}: {each}" for each in line["violations"]]  # type: ignore[attr-defined]

    def _read(self) -> None:
        try:
            lines = _lines(self._path)
            head = next(lines)
            written = head["code"], head.get("one_commit")
            for line in lines:
                self._take(line)
        except (StopIteration, KeyError, TypeError, ValueError) as error:
            raise Invalid(f"{self._path} is no journal of an enumeration ({error!r}): name another file") from None
        _check_written(self._path, *written, self._one_commit)


def code_digest() -> str:
    """Return a digest of the product and its simulator: with another one a seed may be another world."""
    digest = hashlib.blake2b(digest_size=8)
    for package in (dstl, handles, materializer):
        root = Path(str(package.__file__)).parent
        for path in sorted(root.rglob("*.py")):
            digest.update(f"{root.name}/{path.relative_to(root)}\n".encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()


def _head(one_commit: bool) -> dict[str, object]:
    return {"code": code_digest(), "one_commit": one_commit}


def _check_written(path: Path, code: object, mode: object, one_commit: bool) -> None:
    if code != code_digest():
        raise Invalid(f"{path} was written by other code, and the same seed is another world now: name another file")
    if mode != one_commit:
        how = "without" if one_commit else "with"
        raise Invalid(f"{path} was written {how} --one-commit, where the same seed is another world: name another file")


def _append(path: Path, line: object) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line, separators=(",", ":")) + "\n")


def _end_line(path: Path) -> None:
    """Cut off what a writer that was killed has left behind its last line."""
    content = path.read_bytes()
    if not content.endswith(b"\n"):
        path.write_bytes(content.rpartition(b"\n")[0] + b"\n")


def _lines(path: Path) -> Iterator[dict[str, object]]:
    """Yield the lines; the last may be torn, for its writer was killed."""
    text = path.read_text(encoding="utf-8")
    for line in text[: text.rfind("\n") + 1].splitlines():
        yield json.loads(line)


def _summary_line(summary: Summary) -> dict[str, object]:
    line: dict[str, object] = {name: getattr(summary, name) for name in _FIGURES}
    line["faults"] = {str(kind): number for kind, number in summary.faults.items()}
    line["failed"] = [{**asdict(each), "faults": {}, "trace": []} for each in summary.failed]
    return line


def _summary_of(line: dict[str, object]) -> Summary:
    summary = Summary(**{name: line[name] for name in _FIGURES})  # type: ignore[arg-type]
    summary.faults = Counter({FaultKind(kind): number for kind, number in line["faults"].items()})  # type: ignore[attr-defined]
    for each in line["failed"]:  # type: ignore[attr-defined]
        violations = tuple(Violation(**violation) for violation in each["violations"])
        summary.failed.append(SeedResult(**{**each, "violations": violations, "faults": Counter(), "trace": ()}))
    return summary
