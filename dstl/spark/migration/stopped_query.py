"""Spark's checkpoint directory of a stopped query: its owner, its position, and a copy of it without its state.

Files are read through Hadoop, so every scheme that the session knows is taken: ``dstl://``, ``s3a://``, directories.
"""

from __future__ import annotations

import json
from contextlib import closing
from dataclasses import dataclass
from typing import Any, TypeVar

from py4j.protocol import Py4JJavaError  # type: ignore[import-untyped]
from pyspark.sql import SparkSession

from dstl.errors import CorruptData, Invalid, MissingState
from dstl.files.query_records import json_field

_T = TypeVar("_T")
_STATE = "state"
_OURS = "_dstl"
_COMMITS = "commits"


@dataclass(frozen=True, slots=True)
class Position:
    """The point up to which a query's batches are committed.

    Attributes:
        query_id: Spark's query id: it goes with the directory.
        batch_id: The last committed batch.
        watermark_ms: The watermark behind that batch, Unix milliseconds; None where the query has none.
        late_watermark_ms: The watermark of that batch itself.
    """

    query_id: str
    batch_id: int
    watermark_ms: int | None
    late_watermark_ms: int | None


def position_of(where: str, metadata: str, batch_id: int, offsets: str, commit: str) -> Position:
    """Return a query's position from the text of its files. Pure.

    Args:
        where: The directory, for messages.
        metadata: Content of ``metadata``.
        batch_id: The last committed batch.
        offsets: Content of ``offsets/<batch>``.
        commit: Content of ``commits/<batch>``.

    Raises:
        CorruptData: One of them is not what Spark writes; names it.
    """
    query_id = _field(metadata, "id", str, f"{where}/metadata")
    late = _field(offsets, "batchWatermarkMs", int, f"{where}/offsets/{batch_id}")
    after = _field(commit, "nextBatchWatermarkMs", int, f"{where}/commits/{batch_id}")
    return Position(query_id, batch_id, after or None, late or None)


def without_state_ids(commit: str) -> str:
    """Return a commit file's text without the ids of state files that it may name. Pure.

    Raises:
        CorruptData: It is not what Spark writes.
    """
    version, _, body = commit.partition("\n")
    try:
        fields = json.loads(body)
        if "stateUniqueIds" in fields:
            fields["stateUniqueIds"] = {}
    except (ValueError, TypeError) as error:
        raise CorruptData(f"a commit file is not what Spark writes ({error!r}): restore it from a replica") from None
    return f"{version}\n{json.dumps(fields)}"


def _field(text: str, name: str, kind: type[_T], path: str) -> _T:
    found = json_field(text.encode(), name)
    if not isinstance(found, kind) or found == "":
        raise CorruptData(f"{path} is not what Spark writes: restore it from a replica")
    return found


class StoppedQuery:
    """A stopped query, by its checkpoint directory. Calls block.

    Args:
        spark: The session.
        location: As in ``checkpointLocation``.

    Raises:
        Invalid: The session knows no such scheme.
    """

    def __init__(self, spark: SparkSession, location: str) -> None:
        self.location = location.rstrip("/")
        self._jvm: Any = spark._jvm
        self._conf = spark._jsparkSession.sessionState().newHadoopConf()
        self._root, self._files = self._open(self.location)

    def position(self) -> Position:
        """Return how far the query has come.

        Raises:
            MissingState: It is no checkpoint directory of a query, or no batch of it is committed.
            CorruptData: A file is damaged.
        """
        commits = self._commits()
        if not commits:
            raise MissingState(
                f"{self.location} holds no committed batch of a streaming query: name its checkpointLocation"
            )
        last = commits[-1]
        read = self._read
        return position_of(self.location, read("metadata"), last, read(f"offsets/{last}"), read(f"commits/{last}"))

    def check_name(self) -> None:
        """Refuse a path that Spark's reader of state escapes, to look for a directory of the escaped name then.

        Raises:
            Invalid: It has a blank, say.
        """
        uri = self._root.toUri()
        if uri.getRawPath() != uri.getPath():
            raise Invalid(
                f"{self.location}: Spark's reader of state looks for {uri.getRawPath()}: let a link of a name without "
                "blanks, %, # and ? lead to the directory, or copy it there, and migrate that"
            )

    def check_empty(self, target: str) -> None:
        """Refuse a directory that has anything in it.

        Raises:
            Invalid: It has, or the session knows no such scheme.
        """
        root, files = self._open(target)
        if files.exists(root) and len(files.listStatus(root)):
            raise Invalid(f"{target} is not empty: name a new directory for the query to go on with")

    def copy_without_state(self, target: str) -> None:
        """Copy offsets, commits, sources and metadata: with them a query goes on whose state is elsewhere.

        Commits come last, in their order, and make the rest durable on ``dstl://``. With a copy that was broken off a
        query would go on behind an earlier batch than its savepoint holds, which ``StateBackend`` refuses. A commit's
        ids of state files (checkpoint format 2) are left out: those files stay where they are.

        Raises:
            Invalid: The target is not empty, or the session knows no such scheme.
        """
        self.check_empty(target)
        root, files = self._open(target)
        files.mkdirs(root)
        for name in self._names(""):
            if name not in (_STATE, _OURS, _COMMITS):
                source, goal = self._path(self._root, name), self._path(root, name)
                self._jvm.org.apache.hadoop.fs.FileUtil.copy(self._files, source, files, goal, False, self._conf)
        for batch in self._commits():
            name = f"{_COMMITS}/{batch}"
            with closing(files.create(self._path(root, name), False)) as out:
                out.write(without_state_ids(self._read(name)).encode())

    def _commits(self) -> list[int]:
        return sorted(int(name) for name in self._names(_COMMITS) if name.isdigit())

    def _names(self, directory: str) -> list[str]:
        path = self._path(self._root, directory) if directory else self._root
        if not self._files.exists(path):
            return []
        names = (str(each.getPath().getName()) for each in self._files.listStatus(path))
        return sorted(name for name in names if not name.startswith("."))

    def _read(self, name: str) -> str:
        path = self._path(self._root, name)
        if not self._files.exists(path):
            raise MissingState(f"{self.location} has no {name}: name the checkpointLocation of a streaming query")
        with closing(self._files.open(path)) as stream:
            return bytes(stream.readAllBytes()).decode(errors="replace")

    def _path(self, parent: Any, name: str) -> Any:
        return self._jvm.org.apache.hadoop.fs.Path(parent, name)

    def _open(self, location: str) -> tuple[Any, Any]:
        try:
            path = self._jvm.org.apache.hadoop.fs.Path(location)
            return path, path.getFileSystem(self._conf)
        except Py4JJavaError as error:
            raise Invalid(
                f"{location}: this Spark session cannot open it: {error.java_exception.getMessage()}"
            ) from None
