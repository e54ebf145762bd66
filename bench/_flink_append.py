"""Flink's own log as the other side of ``append``: its released classes in a JVM of their own, a round when asked."""

from __future__ import annotations

import json
import shutil
import subprocess
import tempfile
from pathlib import Path
from types import TracebackType

_SOURCE = Path(__file__).with_name("FlinkAppend.java")
_WARM_UP = 12
"""Rounds until the JVM compiles nothing more that shows."""


class FlinkAppend:
    """A warm JVM with Flink's ``FsStateChangelogStorage`` (compression on, local file system).

    Args:
        lib: Directory of Flink's jars: ``deps/lib`` in PyPI's ``apache-flink-libraries``, a source
            distribution, unpacked.
        records: As the benchmark's.
        value_bytes: As the benchmark's.
        key_groups: As the benchmark's.
        ahead: Whether Flink uploads while it appends, as its defaults say, or writes everything at the persist.
    """

    def __init__(self, lib: Path, records: int, value_bytes: int, key_groups: int, *, ahead: bool) -> None:
        if not list(lib.glob("flink-dist-*.jar")):
            raise SystemExit(
                f"{lib} has no flink-dist jar: pip download --no-deps apache-flink-libraries, and unpack it"
            )
        self._classes = tempfile.mkdtemp(prefix="dstl-bench-flink-")
        subprocess.run(["javac", "-cp", f"{lib}/*", "-d", self._classes, str(_SOURCE)], check=True, timeout=120)
        program = ["java", "-Xms4g", "-Xmx4g", "-cp", f"{lib}/*:{self._classes}", "FlinkAppend"]
        self._java = subprocess.Popen(
            [*program, str(records), str(value_bytes), str(key_groups), str(ahead).lower()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def __enter__(self) -> FlinkAppend:
        for _ in range(_WARM_UP):
            self.round()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._java.kill()
        self._java.communicate()
        shutil.rmtree(self._classes, ignore_errors=True)

    def round(self) -> dict[str, float]:
        """Run one round; ``append_persist_s`` and ``replay_s``."""
        assert self._java.stdin is not None
        assert self._java.stdout is not None
        self._java.stdin.write("\n")
        self._java.stdin.flush()
        while line := self._java.stdout.readline():
            if line.startswith("{"):
                found = json.loads(line)
                return {name: float(found[name]) for name in ("append_persist_s", "replay_s")}
        raise SystemExit("Flink's process ended: run it by hand to see why")
