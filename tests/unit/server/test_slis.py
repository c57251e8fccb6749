"""Service level indicators: results of health checks at `/metrics/slis`."""

from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer
from prometheus_client import CollectorRegistry, ProcessCollector

from pykubelet.server.auth.identity import AuthorizerAttributes, required_attributes
from pykubelet.server.metrics.server_metrics import (
    MetricsProvider,
    ProviderMetric,
    ServerMetrics,
    metrics_routes,
    path_label,
    reset_routes,
)
from pykubelet.server.readonly import health_routes
from tests.support.metrics_page import Page, differences


def server(
    metrics: ServerMetrics, registry: CollectorRegistry, *, read_only: bool = False
) -> web.Application:
    app = web.Application()
    checks = {"ping": lambda: None, "syncloop": lambda: "sync Loop took longer than expected"}
    app.add_routes(health_routes(checks, metrics.health))
    app.add_routes(metrics_routes(registry, metrics.health))
    if not read_only:
        app.add_routes(reset_routes(metrics.health))
    return app


async def page(client: TestClient[web.Request, web.Application], path: str = "/metrics/slis") -> Page:
    response = await client.get(path)
    assert response.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
    return Page(await response.text())


async def test_slis_health_checks_counted_by_result_and_reset() -> None:
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    metrics = ServerMetrics(registry)
    async with TestClient(TestServer(server(metrics, registry))) as client:
        assert list((await page(client)).types) == ["process_start_time_seconds"]
        for _ in range(3):
            assert (await client.get("/healthz")).status == 500
        await client.get("/healthz/syncloop")
        await client.get("/healthz?exclude=syncloop")
        found = await page(client)
        assert list(differences(found, "/metrics/slis", "always", "event")) == []
        assert found.value("kubernetes_healthcheck", name="ping", type="healthz") == 1
        assert found.value("kubernetes_healthcheck", name="syncloop", type="healthz") == 0
        total = "kubernetes_healthchecks_total"
        assert found.value(total, name="ping", type="healthz", status="success") == 4
        assert found.value(total, name="syncloop", type="healthz", status="error") == 3
        assert found.values(total, name="syncloop", status="success") == []
        assert "kubernetes_healthcheck" not in (await page(client, "/metrics")).types
        response = await client.delete("/metrics/slis")
        assert (response.status, await response.text()) == (200, "metrics reset\n")
        assert list((await page(client)).types) == ["process_start_time_seconds"]


async def test_slis_read_only_port_cannot_reset() -> None:
    registry = CollectorRegistry()
    metrics = ServerMetrics(registry)
    async with TestClient(TestServer(server(metrics, registry, read_only=True))) as client:
        await client.get("/healthz")
        assert (await client.delete("/metrics/slis")).status == 405
        assert (await page(client)).types


def test_slis_permission_and_label_as_upstream() -> None:
    assert required_attributes("GET", "/metrics/slis") == [AuthorizerAttributes("get", "metrics")]
    assert required_attributes("DELETE", "/metrics/slis") == [AuthorizerAttributes("delete", "metrics")]
    assert path_label("/metrics/slis") == "other"


async def test_metrics_provider_reports_one_source() -> None:
    registry = CollectorRegistry()
    provider: list[MetricsProvider] = ["cadvisor"]
    registry.register(ProviderMetric(lambda: provider[0]))
    async with TestClient(TestServer(server(ServerMetrics(registry), registry))) as client:
        assert (await page(client, "/metrics")).value("kubelet_metrics_provider", provider="cadvisor") == 1
        provider[0] = "cri"
        found = await page(client, "/metrics")
        assert found.value("kubelet_metrics_provider", provider="cri") == 1
        assert found.values("kubelet_metrics_provider", provider="cadvisor") == []
