"""The prober against real servers, in real time."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from aiohttp import web
from prometheus_client import CollectorRegistry, generate_latest

from pykubelet.api.pod import Container, ContainerPort, HTTPGetAction, Probe, TCPSocketAction
from pykubelet.kuberuntime.observed import ObservedPod
from pykubelet.probes.prober import Prober
from pykubelet.probes.results import ProbeUpdate
from pykubelet.util.tasks import TaskScope
from tests.support.probes import no_exec, observed, pod, running
from tests.support.waiting import until


class Told:
    def __init__(self) -> None:
        self.events: list[tuple[str, str]] = []
        self.updates: list[ProbeUpdate] = []
        self.registry = CollectorRegistry()


@asynccontextmanager
async def prober(told: Told) -> AsyncIterator[Prober]:
    made = Prober(
        no_exec,
        lambda pod, container, reason, message: told.events.append((reason, message)),
        told.registry,
        host_ip=lambda: "127.0.0.1",
    )
    made.results.subscribe(told.updates.append)
    async with TaskScope() as scope:
        scope.start(made.run(), name="prober")
        yield made


@asynccontextmanager
async def server(answer: dict[str, str | int]) -> AsyncIterator[int]:
    async def handler(request: web.Request) -> web.Response:
        headers = {"Location": str(answer["to"])} if "to" in answer else {}
        return web.Response(status=int(answer["status"]), headers=headers, text="text")

    app = web.Application()
    app.router.add_get("/ready", handler)
    runner = web.AppRunner(app, shutdown_timeout=0)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield runner.addresses[0][1]
    finally:
        await runner.cleanup()


async def test_prober_http_readiness_ready_then_warning_then_failure() -> None:
    told, answer = Told(), dict[str, str | int](status=200)
    async with server(answer) as port, prober(told) as asking:
        readiness = Probe(
            http_get=HTTPGetAction(port="web", path="/ready"),
            period_seconds=1,
            failure_threshold=1,
            timeout_seconds=30,
        )
        liveness = Probe(tcp_socket=TCPSocketAction(port=port), period_seconds=1, timeout_seconds=30)
        asked = pod(
            Container(
                name="app",
                ports=[ContainerPort(name="web", container_port=port)],
                readiness_probe=readiness,
                liveness_probe=liveness,
            )
        )
        seen = observed(running("app", "c1", time.time_ns()), ip="127.0.0.1")
        asking.add_pod(asked)
        asking.observe(asked, seen)
        await until(lambda: asking.update_status(asked, seen)["app"] == (True, True))
        answer.update(status=302, to="http://elsewhere.example/")
        await until(lambda: len(told.events) > 0)
        assert told.events[0] == (
            "ProbeWarning",
            "Readiness probe warning: Probe terminated redirects, Response body: text",
        )
        assert len(told.updates) == 1
        answer.update(status=503)
        await until(lambda: asking.update_status(asked, seen)["app"] == (True, False))
        assert told.events[-1] == (
            "Unhealthy",
            "Readiness probe failed: HTTP probe failed with statuscode: 503",
        )
        labels = 'namespace="ns",pod="pod-u1",pod_uid="u1",probe_type="Liveness",result="successful"'
        alive = f'prober_probe_total{{container="app",{labels}}}'
        await until(lambda: alive in generate_latest(told.registry).decode())
        text = generate_latest(told.registry).decode()
    assert 'prober_probe_duration_seconds_bucket{container="app",le="0.005"' in text


async def test_prober_host_network_pod_is_probed_at_host_ip() -> None:
    told = Told()
    async with server({"status": 200}) as port, prober(told) as asking:
        probe = Probe(tcp_socket=TCPSocketAction(port=port), timeout_seconds=30)
        container = Container(name="app", readiness_probe=probe)
        for uid, host_network in (("host", True), ("none", False)):
            asked = pod(container, uid=uid, host_network=host_network)
            asking.add_pod(asked)
            seen = ObservedPod(uid=uid, containers=(running("app", uid, time.time_ns()),))
            asking.observe(asked, seen)
        await until(lambda: len(told.updates) > 0)
        await asyncio.sleep(0.05)
        assert [(update.pod_uid, update.result) for update in told.updates] == [("host", "success")]


async def test_prober_pod_removed_cancels_hanging_probe() -> None:
    told = Told()
    closed = asyncio.Event()

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await reader.readline()
            connected.set()
            while await reader.read(100):
                pass
        finally:
            writer.close()
            closed.set()

    connected = asyncio.Event()
    listener = await asyncio.start_server(silent, "127.0.0.1", 0)
    async with listener, prober(told) as asking:
        port = listener.sockets[0].getsockname()[1]
        probe = Probe(http_get=HTTPGetAction(port=port), timeout_seconds=3600)
        asked = pod(Container(name="app", readiness_probe=probe))
        asking.add_pod(asked)
        asking.observe(asked, observed(running("app", "c1", time.time_ns()), ip="127.0.0.1"))
        await asyncio.wait_for(connected.wait(), 45)
        asking.remove_pod("u1")
        await asyncio.wait_for(closed.wait(), 45)
    assert told.updates == []


async def test_prober_listener_raises_ends_run() -> None:
    def fail(update: ProbeUpdate) -> None:
        raise ZeroDivisionError(update.pod_uid)

    made = Prober(no_exec, lambda *event: None, CollectorRegistry(), host_ip=lambda: "127.0.0.1")
    made.results.subscribe(fail)
    async with server({"status": 200}) as port:
        probe = Probe(http_get=HTTPGetAction(port=port, path="/ready"), timeout_seconds=30)
        asked = pod(Container(name="app", readiness_probe=probe))
        made.add_pod(asked)
        made.observe(asked, observed(running("app", "c1", time.time_ns()), ip="127.0.0.1"))
        with pytest.raises(ExceptionGroup) as caught:
            await asyncio.wait_for(made.run(), 45)
    assert caught.group_contains(ZeroDivisionError, match="u1")


async def test_prober_pod_moved_to_other_address_is_probed_there() -> None:
    told, answer = Told(), dict[str, str | int](status=200)
    async with server(answer) as port, prober(told) as asking:
        probe = Probe(http_get=HTTPGetAction(port=port, path="/ready"), period_seconds=1, timeout_seconds=1)
        asked = pod(Container(name="app", readiness_probe=probe))
        asking.add_pod(asked)
        container = running("app", "c1", time.time_ns())
        asking.observe(asked, observed(container, ip="127.0.0.2"))
        await asyncio.sleep(0)
        asking.observe(asked, observed(container, ip="127.0.0.1"))
        await until(lambda: len(told.updates) > 0)
    assert [update.result for update in told.updates] == ["success"]
