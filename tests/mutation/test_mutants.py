"""The mutator changes one thing at a time, and its runner tells a mutant that is noticed from one that is not."""

import ast
import os
import subprocess
import sys
from pathlib import Path

from mutation.mutants import mutants_of

SOURCE = '''
def clip(value: int, low: int = 0) -> int:
    """Return the value, at least low."""
    if not value < low and low:
        return value
    raise ValueError(1 + 1)
'''


def test_each_mutant_has_one_change_and_messages_and_annotations_have_none() -> None:
    found = dict(mutants_of(SOURCE))
    assert sorted(found) == [
        "4: if not not value < low and low",
        "4: not value < low -> without not",
        "4: not value < low and low -> not value < low or low",
        "4: value < low -> value <= low",
        "5: return value -> return None",
    ]
    plain = ast.unparse(ast.parse(SOURCE)).splitlines()
    for source in found.values():
        assert sum(a != b for a, b in zip(plain, source.splitlines(), strict=True)) == 1


PROGRAM = """
import sys
from mutation.run import ROOT, try_mutant
module, test = "handles/segment_handle.py", sys.argv[1]
source = (ROOT / module).read_text()
for more in ("UNUSED = 1", "del SequenceNumberRange"):
    print(try_mutant(module, source + more, [test, "--rootdir=" + sys.argv[2]]))
"""


def test_a_mutant_that_a_test_notices_is_killed_and_another_survives(tmp_path: Path) -> None:
    test = tmp_path / "test_range.py"
    test.write_text(
        "from handles.segment_handle import SequenceNumberRange\n"
        "def test_it():\n    assert SequenceNumberRange(from_sqn=1, to_sqn=3).to_sqn == 3\n"
    )
    # In a process of its own, which has imported nothing and has no threads.
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(test), str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert ran.stdout.split() == ["survived", "killed"]
