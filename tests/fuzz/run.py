"""``PYTHONPATH=tests python -m fuzz.run [--target T] [--executions N] [--seed S] [--json]``: the long form of fuzzing.

An input that raises anything but an error of ``dstl.errors``, takes a second or more than 256 MiB, is written to
``tests/fuzz/corpus/TARGET/``, from where ``test_decoders.py`` runs it for ever.
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

from fuzz.targets import CORPUS, TARGETS, Target

from dstl.errors import DstlError

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


def execute(target: Target, data: bytes, found: Found) -> None:
    found.executions += 1
    began = time.perf_counter()
    try:
        target.decode(data)
        found.decoded += 1
    except DstlError:
        found.refused += 1
    except Exception as error:
        found.bugs.append(f"{type(error).__name__}: {str(error)[:200]} ({keep(target, data)})")
    took = time.perf_counter() - began
    found.slowest_s = max(found.slowest_s, took)
    if took > MOST_SECONDS:
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


def _peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1 << 20 if sys.platform == "darwin" else 1 << 10)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", choices=sorted(TARGETS), action="append")
    parser.add_argument("--executions", type=int, default=1_000_000, help="of each target (default 1,000,000)")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 32))
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    print(f"seed {options.seed}", file=sys.stderr)
    failed = False
    for name in options.target or TARGETS:
        found = fuzz(TARGETS[name], options.executions, options.seed)
        failed |= bool(found.bugs)
        print(json.dumps(asdict(found)) if options.json else found)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
