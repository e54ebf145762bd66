"""The driver's monitor: metrics of the whole application and the page, served by one small HTTP server."""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import replace

from dstl.checkpoint.service import CoordinatorService
from dstl.metrics import MetricSet
from dstl.monitoring.exposition import CONTENT_TYPE, DriverMetrics, Exposition
from dstl.monitoring.overview import Overview, of_driver
from dstl.monitoring.page import Page, assets
from dstl.monitoring.server import PageServer, Reply, Route
from dstl.monitoring.store_reader import StoreReader
from dstl.options import MetricsOptions
from dstl.runtime import IoLoop, Runtime
from dstl.store.base import ObjectStore
from materializer.restore.progress import RestoreStatus

_ANSWER_S = 20.0
"""For an answer to a scraper, which gives up after 10 s by Prometheus's default, or to a page. The coordinator's loop
answers within milliseconds, unless it is stuck."""
_POLL_S = 2.0
"""Between two looks of an open page, which cost no request to the store: about the pace of quick micro-batches."""
_STORE_FRESH_S = 60.0
"""What was read of the store is shown for so long: savepoints are rare, and a look costs some five requests."""


class Monitor:
    """Serves a driver's metrics at ``/metrics``, and its page. Thread-safe.

    What the driver knows comes from memory; savepoints, and checkpoints made before it began, are read from the store
    once a minute while a page is open.

    Args:
        store: The job's location.
        runtime: Clock and jitter.
        service: The coordinator.
        loop: The coordinator's.
        recorder: The driver's metrics.
        options: Where to listen; their port is given.
        batch_seconds: Returns what Spark's last batches took, by their numbers, given the query.

    Raises:
        Invalid: ``prometheus_client`` is not installed, or the address cannot be had.
    """

    def __init__(
        self,
        store: ObjectStore,
        runtime: Runtime,
        service: CoordinatorService,
        loop: IoLoop,
        recorder: MetricSet,
        options: MetricsOptions,
        batch_seconds: Callable[[str], Mapping[int, float]],
    ) -> None:
        self._batch_seconds = batch_seconds
        self._batch_s: dict[int, float] = {}
        self._location = store.location
        self._runtime = runtime
        self._service = service
        self._loop = loop
        self._recorder = recorder
        self._restoring: RestoreStatus | None = None
        self._reader = StoreReader(store, runtime, _STORE_FRESH_S)
        exposition = Exposition(lambda: self.metrics().labelled_samples())
        routes: dict[str, Route] = {"/metrics": lambda _: Reply(exposition.render(), CONTENT_TYPE)}
        if importlib.util.find_spec("jinja2") is None:
            routes["/"] = lambda _: Reply(
                b"The page needs jinja2 in the driver: pip install 'dstl-pyspark[ui]'. Metrics are at /metrics.\n",
                "text/plain; charset=utf-8",
                501,
            )
        else:
            self._page = Page(_POLL_S)
            routes |= {"/": self._show, **assets()}
        self._server = PageServer(routes, options.host, options.port or 0)

    @property
    def url(self) -> str:
        """The address of the page."""
        return self._server.url

    def note_progress(self, status: RestoreStatus) -> None:
        """Take how far a restore has come."""
        self._restoring = None if status.finished else status

    def metrics(self) -> DriverMetrics:
        """Return the metrics at this moment; TaskManagers are asked."""
        members = self._loop.run(self._service.task_manager_metrics(), _ANSWER_S)
        return DriverMetrics(self._location, self._recorder, members, self._service.fleet.wanted)

    def overview(self) -> Overview:
        """Return what the page shows at this moment."""
        found = self._loop.run(self._overview(), _ANSWER_S)
        known = self._batch_s | dict(self._batch_seconds(self._service.query_id))
        self._batch_s = {each.batch_id: known[each.batch_id] for each in found.completed if each.batch_id in known}
        return replace(found, batch_s=self._batch_s)

    def close(self) -> None:
        """Stop serving. Idempotent."""
        self._server.close()

    def _show(self, asked: Mapping[str, str]) -> Reply:
        return self._page.render(self.overview(), asked)

    async def _overview(self) -> Overview:
        service = self._service
        stored, members = await asyncio.gather(self._reader.overview(), service.task_manager_metrics())
        return replace(
            of_driver(stored, service.query_id, service.history, service.completed),
            at=self._runtime.clock.wall(),
            members=members,
            wanted=service.fleet.wanted,
            restoring=self._restoring,
        )
