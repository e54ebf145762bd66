"""The same processor on Spark's own ``transformWithState`` and on ours: keys, rows, frames and states of every type."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.spark
@pytest.mark.timeout(280)
@pytest.mark.skipif(shutil.which("java") is None, reason="Spark needs Java")
def test_a_processor_sees_what_it_sees_in_spark(tmp_path):
    script = Path(__file__).with_name("spark_oracle.py")
    done = subprocess.run(
        [sys.executable, str(script)], cwd=tmp_path, capture_output=True, text=True, timeout=250, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    result = json.loads(done.stdout.splitlines()[-1])
    assert result == {style: {"keys": 20, "different": []} for style in ("row", "pandas")}
