"""The end of a backend: all that its driver holds is closed, in an order in which nothing waits for what is gone."""

from __future__ import annotations

from collections.abc import Sequence

from dstl.checkpoint.service import CoordinatorService
from dstl.runtime import IoLoop
from dstl.spark.application.checkpoint_directory import CheckpointDirectory
from dstl.spark.application.fleet_launcher import FleetLauncher
from dstl.spark.application.monitor import Monitor
from dstl.store.base import ObjectStore


def shut_down(
    loop: IoLoop,
    service: CoordinatorService,
    launcher: FleetLauncher,
    stores: Sequence[ObjectStore],
    monitor: Monitor | None,
    directory: CheckpointDirectory,
) -> None:
    """End the page, the service, its stores, the loop, and then the TaskManagers, which end by themselves.

    Before that, bases that are being made are waited for: see :meth:`BasePublication.finish`.
    """

    async def close() -> None:
        await service.close()
        await directory.close()
        for store in stores:
            await store.close()

    try:
        # It may take minutes, and be interrupted.
        loop.run(directory.settle())
        loop.run(service.bases.finish())
    finally:
        if monitor is not None:
            monitor.close()
        try:
            loop.run(close(), timeout=10)
        finally:
            loop.close()
            launcher.stop()
