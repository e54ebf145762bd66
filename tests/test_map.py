"""The map of the house (DESIGN section 4) beside the tree."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
ROOMS = ("dstl", "materializer", "handles", "tests/simulation")


def _packages() -> set[str]:
    return {f"{init.parent.relative_to(ROOT)}/" for room in ROOMS for init in (ROOT / room).rglob("__init__.py")}


def _map() -> list[tuple[str, str]]:
    design = (ROOT / "dstl" / "DESIGN.md").read_text()
    block = design.split("## 4. Layout and layers")[1].split("```")[1]
    return re.findall(r"^(\S+/) +(\S.*)$", block, re.MULTILINE)


def test_the_map_has_one_line_for_each_room_and_shelf() -> None:
    rooms = [room for room, _ in _map()]
    assert sorted(rooms) == sorted(_packages())


def test_no_python_file_lies_outside_the_rooms() -> None:
    files = {f"{path.parent.relative_to(ROOT)}/" for room in ROOMS for path in (ROOT / room).rglob("*.py")}
    assert files == _packages()
