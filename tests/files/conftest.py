"""What the tests of checkpoint directories share."""

import pytest

from dstl.store.base import ObjectStore


@pytest.fixture
def stores() -> dict[str, ObjectStore]:
    """What is in the stores outlives the applications of a test."""
    return {}
