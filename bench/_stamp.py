"""The stamp of a result: the machine, the versions and the command that it comes from."""

import os
import platform
import subprocess
import time
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


def stamp(name: str, arguments: Sequence[str]) -> dict[str, Any]:
    """Return what somebody who looks at a figure must know of its run."""
    return {
        "bench": name,
        "command": " ".join(["python -m bench", name, *arguments]),
        "made": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "commit": _commit(),
        "machine": {
            "processor": _processor(),
            "cores": os.cpu_count(),
            "memory_gb": _memory_gb(),
            "load_before": round(os.getloadavg()[0], 1),
            "system": f"{platform.system()} {platform.release()}",
        },
        "python": platform.python_version(),
        "pyspark": _version("pyspark"),
        "dstl": _version("dstl-pyspark"),
    }


def machine_text(stamped: dict[str, Any]) -> str:
    """Return the stamp in one line for people."""
    machine = stamped["machine"]
    return (
        f"{machine['processor']}, {machine['cores']} cores, {machine['memory_gb']} GB, load {machine['load_before']} "
        f"before; {machine['system']}; Python {stamped['python']}, PySpark {stamped['pyspark']}, "
        f"DSTL {stamped['dstl']} ({stamped['commit']}); {stamped['made']}"
    )


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _memory_gb() -> int:
    return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9)


def _commit() -> str:
    command = ["git", "describe", "--always", "--dirty"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "no commit"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
