"""``bench peers`` says what is wrong where PyFlink is not what it was given."""

import argparse
import sys

import pytest

from bench import peers


@pytest.mark.parametrize("mode", peers.MODES)
def test_a_python_without_pyflink_is_named_with_what_it_says(tmp_path, mode: str) -> None:
    args = argparse.Namespace(pyflink=sys.executable, slots=1, interval_ms=1000, timeout_s=60.0)
    with pytest.raises(SystemExit, match=rf"in {mode} mode ended with 1:\n(.|\n)*No module named 'pyflink'"):
        peers.run_job(args, mode, tmp_path, tmp_path / "job")
