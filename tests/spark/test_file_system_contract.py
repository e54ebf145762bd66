"""Hadoop's contract of a file system, row by row, and what ``dstl://`` does of it.

The rows are those of ``AbstractContract*Test`` in Hadoop's sources. Where one differs from HDFS, the table says why. No
row is what lies above a checkpoint directory: only that and what is in it are there.
"""

from collections.abc import Callable
from typing import Any

from home import Home
from py4j.protocol import Py4JJavaError
from pyspark.errors.exceptions.captured import CapturedException
from pyspark.sql import SparkSession

UUID = "01234567-89ab-cdef-0123-456789abcdef"


class Files:
    """Hadoop's file system below a checkpoint directory, as a user calls it."""

    def __init__(self, spark: SparkSession, root: str) -> None:
        self._hadoop = spark._jvm.org.apache.hadoop.fs  # type: ignore[union-attr]
        self._new_array = spark.sparkContext._gateway.new_array  # type: ignore[union-attr]
        self._conf = spark._jsc.hadoopConfiguration()
        self._root = root
        self.fs = self.path().getFileSystem(self._conf)
        for name in ("metadata", "commits/0", "commits/1"):
            self.create(name)

    def path(self, name: str = "") -> Any:
        return self._hadoop.Path(f"{self._root}/{name}" if name else self._root)

    def status(self, name: str = "") -> Any:
        return self.fs.getFileStatus(self.path(name))

    def create(self, name: str, content: bytes = b"abc", *, overwrite: bool = False) -> int:
        out = self.fs.create(self.path(name), overwrite)
        out.write(content)
        out.close()
        return int(self.status(name).getLen())

    def read(self, name: str, seek: int = 0, *, closed: bool = False) -> bytes:
        stream = self.fs.open(self.path(name))
        try:
            if closed:
                stream.close()
            stream.seek(seek)
            return bytes(stream.readAllBytes())
        finally:
            stream.close()

    def written(self, name: str, *, closed: bool) -> bool:
        out = self.fs.create(self.path(name), False)
        if closed:
            out.close()
            out.close()
        out.write(b"x")
        found = self.exists(name)
        out.close()
        return found

    def rename(self, source: str, target: str) -> bool:
        return bool(self.fs.rename(self.path(source), self.path(target)))

    def rename_in_context(self, source: str, target: str) -> None:
        context = self._hadoop.FileContext.getFileContext(self.path().toUri(), self._conf)
        context.rename(self.path(source), self.path(target), self._new_array(self._hadoop.Options.Rename, 0))

    def delete(self, name: str, *, recursive: bool) -> bool:
        return bool(self.fs.delete(self.path(name), recursive))

    def exists(self, name: str) -> bool:
        return bool(self.fs.exists(self.path(name)))

    def names(self, name: str) -> list[str]:
        return sorted(each.getPath().getName() for each in self.fs.listStatus(self.path(name)))

    def deep(self, name: str) -> list[str]:
        found, left = [], self.fs.listFiles(self.path(name), True)
        while left.hasNext():
            found.append(left.next().getPath().getName())
        return sorted(found)

    def made(self, name: str) -> bool:
        return bool(self.fs.mkdirs(self.path(name)) and self.status(name).isDirectory())


OK, FALSE = True, False
MISSING, THERE, REFUSED = "FileNotFoundException", "FileAlreadyExistsException", "IOException"
ROWS: list[tuple[str, Callable[[Files], object], object]] = [
    ("create a file", lambda f: f.create("state/0/0/1.delta"), 3),
    ("create an empty file", lambda f: f.create("state/0/0/2.delta", b""), 0),
    ("create over a file", lambda f: f.create("state/0/0/1.delta"), THERE),
    ("create over a file, overwriting", lambda f: f.create("state/0/0/1.delta", b"four", overwrite=True), 4),
    ("create over a directory, overwriting", lambda f: f.create("commits", overwrite=True), THERE),
    # HDFS shows it with no bytes: here, as on object stores, a file is whole or not there.
    ("see a file before it is closed", lambda f: f.written("state/0/0/3.delta", closed=False), FALSE),
    ("write to a closed file", lambda f: f.written("state/0/0/4.delta", closed=True), REFUSED),
    # HDFS: ParentNotDirectoryException. Nobody looks: it would cost each file of a batch a call.
    ("create below a file", lambda f: f.create("sources/0/0/below"), 3),
    ("append", lambda f: f.fs.append(f.path("commits/0")), "UnsupportedOperationException"),
    ("truncate", lambda f: f.fs.truncate(f.path("commits/0"), 1), "UnsupportedOperationException"),
    # Directories need not be made: who needs this one asks for more than create() does.
    ("createNonRecursive", lambda f: f.fs.createNonRecursive(f.path("commits/9"), True, 1, 1, 1, None), REFUSED),
    ("open and read", lambda f: f.read("commits/0"), b"abc"),
    ("open a missing file", lambda f: f.read("commits/9"), MISSING),
    ("open a directory", lambda f: f.read("commits"), MISSING),
    ("seek", lambda f: f.read("commits/0", seek=2), b"c"),
    ("seek to the end, and read", lambda f: f.read("commits/0", seek=3), b""),
    ("seek behind the end", lambda f: f.read("commits/0", seek=4), "EOFException"),
    ("seek before the start", lambda f: f.read("commits/0", seek=-1), "EOFException"),
    ("seek in a closed stream", lambda f: f.read("commits/0", closed=True), REFUSED),
    ("rename a file", lambda f: (f.rename("state/0/0/1.delta", "state/0/0/5.delta"), f.names("state/0/0")),
     (OK, ["2.delta", "3.delta", "4.delta", "5.delta"])),
    ("rename a missing file", lambda f: f.rename("commits/9", "commits/8"), FALSE),
    ("rename onto a file", lambda f: f.rename("state/0/0/2.delta", "state/0/0/5.delta"), FALSE),
    ("rename into a directory", lambda f: (f.rename("state/0/0/5.delta", "state/0/1"), f.names("state/0")),
     (OK, ["0", "1"])),
    # HDFS: true. Its files would be copied one by one, and Spark never asks.
    ("rename a directory", lambda f: f.rename("state/0/0", "state/0/7"), REFUSED),
    ("FileContext: rename a missing file", lambda f: f.rename_in_context("commits/9", "commits/8"), MISSING),
    ("FileContext: rename onto a file", lambda f: f.rename_in_context("commits/0", "commits/1"), THERE),
    # HDFS keeps it. Spark renames a temporary file once, and the memory of this JVM is all that has it.
    ("a temporary file whose rename has failed",
     lambda f: (f.create(f"commits/.0.{UUID}.tmp"), _fails(lambda: f.rename_in_context(f"commits/.0.{UUID}.tmp",
      "commits/0")), f.exists(f"commits/.0.{UUID}.tmp")), (3, THERE, FALSE)),
    ("delete a file", lambda f: (f.delete("state/0/0/2.delta", recursive=False), f.exists("state/0/0/2.delta")),
     (OK, FALSE)),
    ("delete a missing file", lambda f: f.delete("commits/9", recursive=False), FALSE),
    ("delete a directory of files, not recursively", lambda f: f.delete("commits", recursive=False), REFUSED),
    ("delete a directory of files", lambda f: (f.delete("state", recursive=True), f.exists("state")), (OK, FALSE)),
    ("delete an empty directory", lambda f: (f.made("state/1"), f.delete("state/1", recursive=False)), (OK, OK)),
    # HDFS empties it. dstl:// has no list of the checkpoint directories in a bucket.
    ("delete the file system's root", lambda f: f.fs.delete(f._hadoop.Path("dstl:///"), True), FALSE),
    ("list a directory", lambda f: f.names("commits"), ["0", "1"]),
    ("list a file", lambda f: f.names("commits/0"), ["0"]),
    ("list a missing directory", lambda f: f.names("state/9"), MISSING),
    ("list an empty directory", lambda f: (f.made("state/2"), f.names("state/2")), (OK, [])),
    ("list files recursively", lambda f: f.deep(""), ["0", "1", "below", "metadata"]),
    ("glob", lambda f: [each.getPath().getName() for each in f.fs.globStatus(f.path("commits/*"))], ["0", "1"]),
    # This JVM alone knows of a directory without a file.
    ("make a directory", lambda f: f.made("state/3/0"), OK),
    ("make a directory that is there", lambda f: f.made("commits"), OK),
    ("make a directory over a file", lambda f: f.made("commits/0"), THERE),
    # HDFS: ParentNotDirectoryException; see "create below a file".
    ("make a directory below a file", lambda f: f.made("commits/0/below"), OK),
    ("status of a file", lambda f: (f.status("commits/0").isFile(), f.status("commits/0").getLen()), (OK, 3)),
    ("status of a missing file", lambda f: f.status("commits/9"), MISSING),
    ("status of the file system's root", lambda f: f.fs.getFileStatus(f._hadoop.Path("dstl:///")).isDirectory(), OK),
    ("status of a checkpoint directory", lambda f: (f.exists(""), f.status("").isDirectory()), (OK, OK)),
    ("list a checkpoint directory", lambda f: f.names(""), ["commits", "metadata", "sources", "state"]),
    ("delete a checkpoint directory, not recursively", lambda f: f.delete("", recursive=False), REFUSED),
    ("delete a checkpoint directory", lambda f: (f.delete("", recursive=True), f.exists(""), f.exists("commits/0")),
     (OK, FALSE, FALSE)),
    ("list a deleted checkpoint directory", lambda f: f.names(""), MISSING),
    ("create in a deleted checkpoint directory", lambda f: (f.create("metadata"), f.names("")), (3, ["metadata"])),
]  # fmt: skip


def _fails(call: Callable[[], object]) -> object:
    """Return what a call gives, or the name of the exception that it raises; the whole of it is printed."""
    try:
        return call()
    except Py4JJavaError as error:
        print(error.java_exception.toString())
        return str(error.java_exception.getClass().getSimpleName())
    except CapturedException as error:
        print(error)
        return type(error).__name__


def test_every_row_of_hadoops_contract(home: Home) -> None:
    files = Files(home.spark, f"dstl://{home.path}/jobs/query")
    found = {name: _fails(lambda: call(files)) for name, call, _ in ROWS}  # noqa: B023
    assert found == {name: expected for name, _, expected in ROWS}
