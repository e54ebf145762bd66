"""``PYTHONPATH=tests python -m fuzz.run [--target T] [--executions N] [--journal FILE]``: the long form of fuzzing.

An input that raises anything but an error of ``dstl.errors``, takes a second or more than 256 MiB, is written to
``tests/fuzz/corpus/TARGET/``, from where ``test_fuzz_page.py`` runs it for ever. Executions come in chunks, each with
inputs of its own; with a journal a run that was stopped goes on behind the last whole chunk, with the journal's seed.
"""

import argparse
import gc
import hashlib
import json
import random
import resource
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

from fuzz.targets import CORPUS, TARGETS, Target

from dstl.errors import DstlError, Invalid
from tests.simulation.journal import JournalFile

CHUNK = 10_000
MOST_SECONDS = 1.0
MOST_MIB = 256


@dataclass
class Found:
    """What a number of executions have shown."""

    target: str
    executions: int = 0
    decoded: int = 0
    refused: int = 0
    slowest_s: float = 0.0
    grown_mib: float = 0.0
    seconds: float = 0.0
    bugs: list[str] = field(default_factory=list)

    def join(self, other: "Found") -> None:
        """Take in what more executions have shown."""
        for name in ("executions", "decoded", "refused", "seconds", "bugs"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for name in ("slowest_s", "grown_mib"):
            setattr(self, name, max(getattr(self, name), getattr(other, name)))


class Journal(JournalFile):
    """The journal of a run: behind its seed, what each chunk has shown."""

    def __init__(self, path: Path, seed: int) -> None:
        super().__init__(path, {"seed": seed})
        self.seed: int = self.head["seed"]
        self.done = {(line["target"], line["chunk"]): Found(**line["found"]) for line in self.lines}

    def add(self, target: str, chunk: int, found: Found) -> None:
        self.done[target, chunk] = found
        self.append({"target": target, "chunk": chunk, "found": asdict(found)})


def execute(target: Target, data: bytes, found: Found) -> None:
    found.executions += 1
    began = time.process_time()  # this process alone: the machine may be busy
    try:
        target.decode(data)
        found.decoded += 1
    except DstlError:
        found.refused += 1
    except Exception as error:
        found.bugs.append(f"{type(error).__name__}: {str(error)[:200]} ({keep(target, data)})")
    took = time.process_time() - began
    found.slowest_s = max(found.slowest_s, took)
    if took > MOST_SECONDS * target.cost:
        found.bugs.append(f"{took:.1f} s ({keep(target, data)})")


def keep(target: Target, data: bytes) -> str:
    folder = CORPUS / target.name
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / hashlib.blake2b(data, digest_size=6).hexdigest()
    path.write_bytes(data)
    return str(path.relative_to(CORPUS))


def fuzz(target: Target, executions: int, seed: int, most_bugs: int = 5) -> Found:
    rng, found = random.Random(f"{seed}:{target.name}"), Found(target.name)
    before, began = _peak_mib(), time.perf_counter()
    while found.executions < executions and len(found.bugs) < most_bugs:
        execute(target, target.input(rng), found)
    found.seconds = time.perf_counter() - began
    gc.collect()
    found.grown_mib = _peak_mib() - before
    if found.grown_mib > MOST_MIB:
        found.bugs.append(f"{found.grown_mib:.0f} MiB were taken")
    return found


def fuzz_in_chunks(target: Target, executions: int, seed: int, journal: Journal | None = None) -> Found:
    """Execute, chunk by chunk, what the journal does not have."""
    whole = Found(target.name)
    for chunk in range(-(-executions // CHUNK)):
        found = journal.done.get((target.name, chunk)) if journal else None
        if found is None:
            found = fuzz(target, min(CHUNK, executions - chunk * CHUNK), seed + chunk)
            if journal:
                journal.add(target.name, chunk, found)
        whole.join(found)
    return whole


def _peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1 << 20 if sys.platform == "darwin" else 1 << 10)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", choices=sorted(TARGETS), action="append")
    parser.add_argument(
        "--executions", type=int, default=1_000_000, help="of each target (default 1,000,000), but fewer of slow ones"
    )
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 32))
    parser.add_argument("--journal", type=Path, help="go on where this file ends, if it is there")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    try:
        journal = Journal(options.journal, options.seed) if options.journal else None
    except Invalid as error:
        parser.error(str(error))
    seed = journal.seed if journal else options.seed
    print(f"seed {seed}", file=sys.stderr)
    failed = False
    for name in options.target or TARGETS:
        found = fuzz_in_chunks(TARGETS[name], options.executions // TARGETS[name].cost, seed, journal)
        failed |= bool(found.bugs)
        print(json.dumps(asdict(found)) if options.json else found, flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
