"""Shared fixtures; the seed of every run is printed, so that a failure can be replayed with ``DSTL_TEST_SEED``."""

import os
import random

import pytest

# In the environment, so that processes which share the tests have one seed, the one that is printed.
SEED = int(os.environ.setdefault("DSTL_TEST_SEED", str(random.SystemRandom().randrange(1 << 32))))

# A JVM of a test lives for seconds: the second compiler and a parallel collector cost it more than they give it.
os.environ.setdefault("JDK_JAVA_OPTIONS", "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC")


def pytest_report_header() -> str:
    return f"DSTL_TEST_SEED={SEED}"


@pytest.fixture
def seed() -> int:
    return SEED
