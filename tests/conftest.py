"""Shared fixtures; the seed of every run is printed, so that a failure can be replayed with ``DSTL_TEST_SEED``."""

import os
import random

import pytest

SEED = int(os.environ.get("DSTL_TEST_SEED", random.SystemRandom().randrange(1 << 32)))


def pytest_report_header() -> str:
    return f"DSTL_TEST_SEED={SEED}"


@pytest.fixture
def seed() -> int:
    return SEED
