"""What the tests of checkpoint directories share."""

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from worlds.files import Stores


@pytest.fixture
def stores() -> Stores:
    """What is in the stores outlives the applications of a test."""
    return {}


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory whose name is short enough for a socket."""
    with TemporaryDirectory() as name:
        yield Path(name)
