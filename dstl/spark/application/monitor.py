"""The driver's monitor: metrics of the whole application and the page, served by one small HTTP server."""

from __future__ import annotations

from dstl.checkpoint.service import CoordinatorService
from dstl.metrics import MetricSet
from dstl.monitoring.driver_metrics import DriverMetrics
from dstl.monitoring.exposition import CONTENT_TYPE, Exposition
from dstl.monitoring.server import PageServer, Reply
from dstl.options import MetricsOptions
from dstl.runtime import IoLoop

__all__ = ["Monitor"]

_ANSWER_S = 5.0


class Monitor:
    """Serves a driver's metrics at ``/metrics``. Thread-safe.

    Args:
        location: The job's.
        service: The coordinator.
        loop: The coordinator's.
        recorder: The driver's metrics.
        options: Where to listen; their port is given.

    Raises:
        Invalid: ``prometheus_client`` is not installed, or the address cannot be had.
    """

    def __init__(
        self, location: str, service: CoordinatorService, loop: IoLoop, recorder: MetricSet, options: MetricsOptions
    ) -> None:
        self._location = location
        self._service = service
        self._loop = loop
        self._recorder = recorder
        exposition = Exposition(lambda: self.metrics().labelled())
        routes = {"/metrics": lambda _: Reply(exposition.render(), CONTENT_TYPE)}
        self._server = PageServer(routes, options.host, options.port or 0)

    @property
    def url(self) -> str:
        """The address of the page."""
        return self._server.url

    def metrics(self) -> DriverMetrics:
        """Return the metrics at this moment; TaskManagers are asked."""
        members = self._loop.run(self._service.task_manager_metrics(), _ANSWER_S)
        return DriverMetrics(self._location, self._recorder, members, self._service.fleet.wanted)

    def close(self) -> None:
        """Stop serving. Idempotent."""
        self._server.close()
