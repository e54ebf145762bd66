"""Uses an installation from outside the tree as readers of the README do: ``python use_installation.py README.md``."""

import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

from pyspark.sql import SparkSession

from dstl.spark import jar_path

for name in ("dstl", "handles", "materializer", "dstl.changelog.storage", "dstl.checkpoint.service", "dstl.store"):
    package = Path(str(import_module(name).__file__))
    assert "site-packages" in package.parts, package
    assert "." in name or package.with_name("py.typed").is_file()

# A StateBackend: the first program, and what the page says that it prints.
page = Path(sys.argv[1]).read_text(encoding="utf-8")
found = re.search(r"^```python\n(.*?)^```$.*?^<!-- output -->\n```text\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
assert found is not None
Path("visits.py").write_text(found[1], encoding="utf-8")
said = subprocess.run([sys.executable, "visits.py"], stdout=subprocess.PIPE, text=True, check=True).stdout
assert said == found[2], said

# dstl://: Spark's own operators over the same rows.
builder = SparkSession.builder.config("spark.jars", jar_path()).config("spark.plugins", "dstl.spark.DstlPlugin")
spark = builder.config("spark.sql.shuffle.partitions", "2").getOrCreate()
counts = spark.readStream.schema("page string").json("clicks").groupBy("page").count()
writer = counts.writeStream.outputMode("complete").format("memory").queryName("counts").trigger(availableNow=True)
writer.option("checkpointLocation", f"dstl://{Path.cwd()}/counts").start().awaitTermination()
assert sorted(map(tuple, spark.table("counts").collect())) == [("home", 2), ("shop", 1)]
assert not Path("counts", "commits").exists(), "Spark has written past the file system"
spark.stop()
