"""The parts of one application around its query: where the driver is, what its location is called, how it all ends."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Sequence
from typing import Any

import pyspark
from pyspark.sql import SparkSession

from dstl.checkpoint.service import CoordinatorService
from dstl.errors import Invalid
from dstl.runtime import IoLoop
from dstl.spark.fleet_launcher import FleetLauncher
from dstl.state.registry import StateRegistry
from dstl.store.base import ObjectStore, check_name

__all__ = ["absolute_location", "check_operator_name", "check_pyspark", "driver_host", "merge_registries", "shut_down"]


def check_pyspark() -> None:
    """Say in one sentence when PySpark is too old: ``repartitionById`` came with 4.1.

    Raises:
        Invalid: It is below 4.1.
    """
    version = tuple(int(part) for part in re.findall(r"\d+", pyspark.__version__)[:2])
    if version < (4, 1):
        raise Invalid(
            f"PySpark {pyspark.__version__} is too old: DSTL needs 4.1 (pip install -U 'dstl-pyspark[spark]')"
        )


def check_operator_name(name: str) -> str:
    """Return the name if it can be an operator's: one path element of the grammar of object names.

    Raises:
        Invalid: It cannot.
    """
    if re.fullmatch(r"[A-Za-z0-9_\-]{1,64}", check_name(name)) is None:
        raise Invalid(f"not an operator name: {name!r}; use letters, digits, '-' and '_', at most 64")
    return name


def driver_host(session: SparkSession) -> str:
    """Return the address at which executors reach this driver."""
    if session.sparkContext.master.startswith("local"):
        return "127.0.0.1"
    host: str = session.conf.get("spark.driver.host") or socket.gethostname()
    return host


def absolute_location(location: str) -> str:
    """Return the location with directories made absolute: a TaskManager may run in another one."""
    parts = [p if "://" in p else os.path.abspath(os.path.expanduser(p)) for p in location.split(",")]
    return ",".join(parts)


def merge_registries(known: Any, reported: Any) -> dict[str, Any]:
    """Return what two of an operator's state registries know together, as plain data."""
    return StateRegistry.from_wire(dict(known)).merge(StateRegistry.from_wire(dict(reported))).to_wire()


def shut_down(
    loop: IoLoop, service: CoordinatorService, launcher: FleetLauncher, stores: Sequence[ObjectStore]
) -> None:
    """End an application: the service, its stores, the loop, and then the TaskManagers, which end by themselves."""

    async def close() -> None:
        await service.close()
        for store in stores:
            await store.close()

    try:
        loop.run(close(), timeout=10)
    finally:
        loop.close()
        launcher.stop()
