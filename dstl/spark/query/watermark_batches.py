"""Batches without input once the watermark has moved on, as Spark makes them for its own operators.

Spark looks at its own stateful operators only. So there is a source beside the input whose offset is the watermark that
the next batch will go by, ours and Spark's: when one has risen, there is something new, and never a row. The source
reads them in a file that the driver program rewrites with each checkpoint.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence

from pyspark.sql import DataFrame

from dstl.spark.query.ticks import quiet_source, with_batches_of
from handles.checkpoint import CompletedCheckpoint
from materializer.local_disk import ScratchDirectory

_log = logging.getLogger(__name__)

WATERMARKS = "dstl_watermark"
"""The source's name, and that of its offset."""
_FILE = "watermark"
_NO_DATA_BATCHES = "spark.sql.streaming.noDataMicroBatches.enabled"


class WatermarkFile:
    """The driver's end: a file with the watermarks of the next batch, in a directory of its own that use makes."""

    def __init__(self) -> None:
        self._directory: ScratchDirectory | None = None
        self._marks: dict[str, int] = {}

    def path(self, watermark_ms: Callable[[], int | None]) -> str:
        """Return where it is, made at the first call.

        Args:
            watermark_ms: Returns the watermark to begin with, Unix milliseconds, None for none: what is due by it fires
                when the query starts.
        """
        if self._directory is None:
            begin = watermark_ms()
            self._directory = ScratchDirectory()
            self.write(begin)
        return str(self._directory.path / _FILE)

    def write(self, watermark_ms: int | None = None, *, sparks_ms: int | None = None) -> None:
        """Let the next batch go by these watermarks, Unix milliseconds; None leaves one as it is.

        Where the disk takes no file, no batch without rows is made for them.
        """
        told = {WATERMARKS: watermark_ms, "sparks": sparks_ms}
        marks = self._marks | {name: mark for name, mark in told.items() if mark is not None}
        if self._directory is None or marks == self._marks:
            return
        staged = self._directory.path / f"{_FILE}.new"
        try:
            staged.write_text(json.dumps(marks))
            staged.replace(self._directory.path / _FILE)
        except OSError as error:
            _log.warning("%s: what is due by the watermark comes with the next rows: %s", staged, error.strerror)
        else:
            self._marks = marks

    def follow(self, completed: Sequence[CompletedCheckpoint]) -> None:
        """Let the next batch go by the watermark of the last of these checkpoints."""
        self.write(completed[-1].watermark_ms if completed else None)

    def close(self) -> None:
        """Remove it. Idempotent."""
        directory, self._directory = self._directory, None
        if directory is not None:
            directory.close()


def with_watermark_batches(df: DataFrame, file: WatermarkFile, begin_ms: Callable[[], int | None]) -> DataFrame:
    """Return the same rows from a stream that has a batch whenever the watermark has moved.

    Where the session has Spark make no batches without data, nor does this.

    Args:
        df: The rows.
        file: Where the driver writes the watermark.
        begin_ms: See :meth:`WatermarkFile.path`.
    """
    session = df.sparkSession
    if str(session.conf.get(_NO_DATA_BATCHES, "true")).lower() != "true":
        return df
    return with_batches_of(df, quiet_source(session, WATERMARKS, path=file.path(begin_ms)))
