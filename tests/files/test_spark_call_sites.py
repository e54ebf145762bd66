"""A canary for each new Spark: streaming code reaches a checkpoint directory by the calls that are known, and no other.

``spark_call_sites.txt`` has, by class, every method of Hadoop's file systems and of Spark's checkpoint file managers
that the streaming code of PySpark 4.1.4 and 4.3.0 names. A new one may be a file that ``dstl://`` does not expect, or
one that is read before its barrier: look at it, then add it with ``python tests/files/test_spark_call_sites.py JARS``.
"""

import struct
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

from dstl.jvm.build import spark_jars

KNOWN = Path(__file__).with_name("spark_call_sites.txt")
STREAMING = ("org/apache/spark/sql/execution/streaming/", "org/apache/spark/sql/execution/datasources/v2/state/")
TARGETS = {
    "FileSystem",
    "FileContext",
    "FileUtil",
    "CheckpointFileManager",
    "ChecksumCheckpointFileManager",
    "FileSystemBasedCheckpointFileManager",
    "FileContextBasedCheckpointFileManager",
}
# Bytes of each entry of a constant pool behind its tag (JVM specification, 4.4); text says its own length.
SIZES = {3: 4, 4: 4, 5: 8, 6: 8, 7: 2, 8: 2, 9: 4, 10: 4, 11: 4, 12: 4, 15: 3, 16: 2, 17: 4, 18: 4, 19: 2, 20: 2}
TEXT, CLASS, METHOD, INTERFACE_METHOD, NAME = 1, 7, 10, 11, 12


def called(content: bytes) -> Iterator[tuple[str, str]]:
    """Yield (class, method) of every method that a class file names."""
    (count,) = struct.unpack_from(">H", content, 8)
    pool: dict[int, tuple[int, bytes]] = {}
    at, index = 10, 1
    while index < count:
        tag = content[at]
        size = 2 + struct.unpack_from(">H", content, at + 1)[0] if tag == TEXT else SIZES[tag]
        pool[index] = tag, content[at + 1 : at + 1 + size]
        at += 1 + size
        index += 2 if tag in (5, 6) else 1

    def text(number: int) -> str:
        return pool[number][1][2:].decode(errors="replace")

    for tag, body in pool.values():
        if tag in (METHOD, INTERFACE_METHOD):
            owner, name = struct.unpack(">HH", body)
            (class_name,) = struct.unpack(">H", pool[owner][1])
            (method_name, _) = struct.unpack(">HH", pool[name][1])
            yield text(class_name), text(method_name)


def call_sites(jars: Path) -> set[str]:
    """Return ``Class Target.method`` of everything that streaming code calls of a file system; top-level classes."""
    found = set()
    (path,) = jars.glob("spark-sql_2*.jar")
    with zipfile.ZipFile(path) as jar:
        for name in jar.namelist():
            if not name.startswith(STREAMING) or not name.endswith(".class"):
                continue
            caller = name.removesuffix(".class").rpartition("/")[2].partition("$")[0]
            for owner, method in called(jar.read(name)):
                target = owner.rpartition("/")[2].partition("$")[0]
                is_call = target in TARGETS and caller not in TARGETS and not method.startswith(("$", "<"))
                if is_call or (target, method) == ("Path", "getFileSystem"):
                    found.add(f"{caller} {target}.{method}")
    return found


def test_spark_reaches_its_checkpoint_directories_by_no_call_that_is_not_known() -> None:
    found = call_sites(spark_jars())
    assert len(found) > 80, "the list itself is no longer read from the jar"
    new = sorted(found - set(KNOWN.read_text().splitlines()))
    assert new == [], "this Spark has calls that dstl:// was not read against"


if __name__ == "__main__":
    known = set(KNOWN.read_text().splitlines()) if KNOWN.exists() else set()
    for each in sys.argv[1:]:
        known |= call_sites(Path(each))
    KNOWN.write_text("\n".join(sorted(known)) + "\n")
