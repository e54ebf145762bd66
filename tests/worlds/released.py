"""The job whose location is kept of every release, and what its states hold.

``python tests/worlds/released.py heap|rocksdb`` runs it, and writes ``tests/golden/location_VERSION_TABLE.zip``, which
is never written again: it is what that release has stored.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
import zipfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

from pyspark.sql import Row, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming import StatefulProcessor

GOLDEN = Path(__file__).parents[1] / "golden"
OUTPUT = "user string, n long"

Rows = list[tuple[Any, ...]]

EXPECTED: dict[tuple[str, str], Rows] = {
    ("visits", "total"): [(("ann",), None, (3, "c")), (("bob",), None, (1, "a")), (("cleo",), None, (1, "c"))],
    ("visits", "pages"): [
        (("ann",), None, ("a",)),
        (("ann",), None, ("b",)),
        (("ann",), None, ("c",)),
        (("bob",), None, ("a",)),
        (("cleo",), None, ("c",)),
    ],
    ("visits", "by_page"): [
        (("ann",), ("a",), (1,)),
        (("ann",), ("b",), (1,)),
        (("ann",), ("c",), (1,)),
        (("bob",), ("a",), (1,)),
        (("cleo",), ("c",), (1,)),
    ],
    ("visits", "$timers"): [(("ann",), (4_000_000_000_000,), ()), (("bob",), (4_000_000_000_000,), ())],
    ("sums", "aggregates"): [(("a",), None, (2,)), (("b",), None, (1,)), (("c",), None, (2,))],
}
"""Rows of every state, sorted: key, user key, value."""


class Visits(StatefulProcessor):
    """Has a state of each kind, and timers that never fire."""

    def init(self, handle: Any) -> None:
        self.handle = handle
        self.total = handle.getValueState("total", "n long, last string")
        self.pages = handle.getListState("pages", "page string")
        self.by_page = handle.getMapState("by_page", "page string", "n long", 10**15)

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Any:
        n, last = self.total.get() or (0, "")
        for row in sorted(rows, key=lambda row: row.page):
            n, last = n + 1, row.page
            self.pages.appendValue((row.page,))
            (seen,) = self.by_page.getValue((row.page,)) or (0,)
            self.by_page.updateValue((row.page,), (seen + 1,))
        self.total.update((n, last))
        if key[0] != "cleo":
            self.handle.registerTimer(4_000_000_000_000)
        yield Row(user=key[0], n=n)

    def close(self) -> None:
        pass


def main(table: str) -> Path:
    """Run the job, three batches with a restart, and keep its location."""
    from dstl.options import MaterializationOptions
    from dstl.spark import StateBackend

    out = GOLDEN / f"location_{version('dstl-pyspark')}_{table}.zip"
    if out.exists():
        raise SystemExit(f"{out} is there: it is what that release has stored")
    often = MaterializationOptions(interval_s=0.1, min_pause_s=0, min_log_bytes=0)
    with tempfile.TemporaryDirectory() as directory:
        work = Path(directory)
        (work / "in").mkdir()
        spark = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false").getOrCreate()
        for number, clicks in enumerate(({"ann": "a", "bob": "a"}, {"ann": "b"}, {"ann": "c", "cleo": "c"})):
            lines = [json.dumps({"user": user, "page": page}) for user, page in clicks.items()]
            (work / "in" / f"{number}.json").write_text("\n".join(lines))
            with StateBackend(work / "state", parallelism=2, table=table, materialization=often) as backend:  # type: ignore[arg-type]
                read = spark.readStream.schema("user string, page string").json(str(work / "in"))
                visits = backend.groupBy(read, "user").transformWithState(
                    Visits(), OUTPUT, "update", "processingTime", name="visits"
                )
                sums = backend.groupBy(read, "page").agg(F.count("*").alias("n"), name="sums")
                both = visits.selectExpr("user AS k", "n").unionByName(sums.selectExpr("page AS k", "n"))
                writer = both.writeStream.outputMode("update").format("noop")
                writer = writer.option("checkpointLocation", backend.checkpoint_location).trigger(availableNow=True)
                writer.start().awaitTermination()
                if number == 1:
                    time.sleep(1)  # a materialization, which the next batch names
                if number == 2:
                    backend.savepoint("kept")
        spark.stop()
        with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
            for path in sorted((work / "state").rglob("*")):
                if path.is_file():
                    archive.write(path, path.relative_to(work / "state"))
    return out


if __name__ == "__main__":
    os.environ["PYSPARK_PYTHON"] = sys.executable
    print(main(sys.argv[1]))
