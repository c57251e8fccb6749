"""`/metrics` and `/metrics/probes`: the agent's numbers, as Prometheus reads them.

Probes have a page of their own, because they have a series for each container.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from aiohttp import hdrs, web
from prometheus_client import CollectorRegistry, Metric
from prometheus_client.exposition import choose_encoder

_PROBES = "prober_"
_EVERYWHERE = "process_start_time_seconds"


def metrics_routes(registry: CollectorRegistry) -> list[web.RouteDef]:
    """Routes for the metrics of one registry."""

    def page(wanted: Callable[[str], bool]) -> Callable[[web.Request], web.Response]:
        def answer(request: web.Request) -> web.Response:
            try:
                encode, content_type = choose_encoder(request.headers.get(hdrs.ACCEPT, ""))
            except (TypeError, ValueError):
                # The library does not expect versions that are no numbers.
                encode, content_type = choose_encoder("")
            body: bytes = encode(_Part(registry, wanted))
            return web.Response(body=body, headers={hdrs.CONTENT_TYPE: content_type})

        return answer

    own = page(lambda name: not name.startswith(_PROBES))
    probes = page(lambda name: name.startswith(_PROBES) or name == _EVERYWHERE)

    async def metrics(request: web.Request) -> web.Response:
        return own(request)

    async def metrics_of_probes(request: web.Request) -> web.Response:
        return probes(request)

    return [web.get("/metrics", metrics), web.get("/metrics/probes", metrics_of_probes)]


class _Part:
    """Some of a registry's metrics, by name."""

    def __init__(self, registry: CollectorRegistry, wanted: Callable[[str], bool]) -> None:
        self._registry = registry
        self._wanted = wanted

    def collect(self) -> Iterable[Metric]:
        return (_undated(metric) for metric in self._registry.collect() if self._wanted(metric.name))


def _undated(metric: Metric) -> Metric:
    """The same without the time at which each series began, which the library adds and nobody expects."""
    if metric.type not in ("counter", "histogram", "summary"):
        return metric
    part = Metric(metric.name, metric.documentation, metric.type, metric.unit)
    part.samples = [sample for sample in metric.samples if not sample.name.endswith("_created")]
    return part
