"""Probes by third-party code."""

import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from pykubelet.api.meta import ObjectMeta
from pykubelet.api.pod import Container, EnvVar, ExecAction, Pod, Probe, TCPSocketAction
from pykubelet.probes.custom import CustomProbes, ProbeRequest, installed_probes, selected_handler
from pykubelet.probes.prober import Prober
from pykubelet.probes.runner import Checker, ExecSlots
from pykubelet.probes.types import OUTPUT_LIMIT, Kind, ProbeResult, Target
from pykubelet.util.tasks import TaskScope
from tests.support.probes import no_exec, observed, pod, running
from tests.support.waiting import until

ANNOTATIONS = {"liveness.probes.pykubelet.dev/app": "mine"}
POD = Pod(
    metadata=ObjectMeta(name="web", namespace="ns", uid="u1", labels={"a": "b"}, annotations=ANNOTATIONS)
)
PROBE = Probe(exec=ExecAction(command=["check", "$(LAG)"]), timeout_seconds=30)
CONTAINER = Container(name="app", env=[EnvVar(name="LAG", value="30")])


async def check(function: Any, probe: Probe = PROBE, attempts: int = 1) -> ProbeResult:
    checker = Checker(no_exec, ExecSlots(1), CustomProbes({"mine": function}))
    target = Target(CONTAINER, "c1", "10.0.0.1", selected_handler(POD, "app", "liveness", probe))
    return await checker.check(probe, target, attempts)


@pytest.mark.parametrize(
    ("container", "kind", "probe", "expected"),
    [
        ("app", "liveness", PROBE, "mine"),
        ("app", "readiness", PROBE, None),
        ("other", "liveness", PROBE, None),
        ("app", "liveness", Probe(tcp_socket=TCPSocketAction(port=80)), None),
    ],
)
def test_selected_handler_annotation_of_kind_and_container_with_exec(
    container: str, kind: Kind, probe: Probe, expected: str | None
) -> None:
    selected = selected_handler(POD, container, kind, probe)
    assert (selected.handler if selected else None) == expected


async def test_check_function_receives_container_and_command() -> None:
    requests: list[ProbeRequest] = []

    def function(request: ProbeRequest) -> ProbeResult:
        requests.append(request)
        return ProbeResult("warning", "slow")

    assert await check(function) == ProbeResult("warning", "slow")
    (request,) = requests
    assert (request.namespace, request.pod, request.uid, request.labels) == ("ns", "web", "u1", {"a": "b"})
    assert (request.container, request.container_id, request.ip) == ("app", "c1", "10.0.0.1")
    assert (request.kind, request.command, request.timeout) == ("liveness", ("check", "30"), 30)


class Unprintable:
    def __str__(self) -> str:
        raise OSError("no text")


def raising(request: ProbeRequest) -> ProbeResult:
    raise ValueError("x" * 2 * OUTPUT_LIMIT)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (raising, "ValueError: xxx"),
        (lambda request: True, "must return a ProbeResult"),
        (lambda request: ProbeResult("yes"), "must return a ProbeResult"),  # type: ignore[arg-type]
        (lambda: None, "TypeError"),
        (lambda request: sys.exit("bye"), "SystemExit: bye"),
        (lambda request: ProbeResult("success", Unprintable()), "OSError: no text"),  # type: ignore[arg-type]
    ],
    ids=["raises", "bool", "result", "signature", "exit", "output"],
)
async def test_check_broken_function_is_error_without_evidence(
    function: Callable[..., Any], message: str
) -> None:
    outcome = await check(function)
    assert outcome.errored
    assert outcome.result == "unknown"
    assert message in outcome.output
    assert len(outcome.output) <= OUTPUT_LIMIT


async def test_check_long_output_is_cut() -> None:
    outcome = await check(lambda request: ProbeResult("failure", "x" * 2 * OUTPUT_LIMIT))
    assert (outcome.result, len(outcome.output)) == ("failure", OUTPUT_LIMIT)


async def test_check_hanging_function_fails_and_its_calls_are_limited() -> None:
    release = threading.Event()
    custom = CustomProbes({"mine": lambda request: ProbeResult(str(release.wait()))}, max_calls=1)  # type: ignore[arg-type]
    target = Target(CONTAINER, "c1", "10.0.0.1", selected_handler(POD, "app", "liveness", PROBE))
    try:
        first = await custom.check(target, [], 1)
        second = await custom.check(target, [], 1)
    finally:
        release.set()
    assert first == ProbeResult("failure", "probe handler 'mine' timed out after 1s")
    assert second.errored
    assert "1 calls have not returned" in second.output


async def test_check_handler_not_installed_is_error_with_remedy() -> None:
    checker = Checker(no_exec, ExecSlots(1))
    target = Target(CONTAINER, "c1", "10.0.0.1", selected_handler(POD, "app", "liveness", PROBE))
    outcome = await checker.check(PROBE, target)
    assert outcome.errored
    assert "probe handler 'mine' is not installed on this node" in outcome.output


async def test_prober_annotated_pod_is_probed_by_function() -> None:
    requests: list[ProbeRequest] = []

    def function(request: ProbeRequest) -> ProbeResult:
        requests.append(request)
        return ProbeResult("success")

    prober = Prober(
        no_exec,
        lambda pod, container, reason, message: None,
        CollectorRegistry(),
        host_ip=lambda: "192.0.2.1",
        custom=CustomProbes({"mine": function}),
    )
    probed = pod(Container(name="app", readiness_probe=Probe(exec=ExecAction(command=["x"]))))
    probed.metadata.annotations["readiness.probes.pykubelet.dev/app"] = "mine"
    results: list[tuple[str, str]] = []
    prober.results.subscribe(lambda update: results.append((update.kind, update.result)))
    async with TaskScope() as scope:
        scope.start(prober.run(), name="prober")
        prober.add_pod(probed)
        prober.observe(probed, observed(running("app", "c1", time.time_ns())))
        await until(lambda: ("readiness", "success") in results)
    assert (requests[0].kind, requests[0].container_id, requests[0].ip) == ("readiness", "c1", "10.0.0.1")


@dataclass
class Entry:
    name: str
    loaded: Any
    value: str = "their.module:probe"

    def load(self) -> Any:
        if isinstance(self.loaded, Exception):
            raise self.loaded
        return self.loaded


async def test_installed_probes_broken_entries_are_skipped(caplog: pytest.LogCaptureFixture) -> None:
    custom = installed_probes(
        [
            Entry("missing", ImportError("no module")),
            Entry("text", "not a function"),
            Entry("mine", lambda request: ProbeResult("success", "first"), "a:probe"),
            Entry("mine", lambda request: ProbeResult("success", "second"), "b:probe"),
        ]
    )
    target = Target(CONTAINER, "c1", "10.0.0.1", selected_handler(POD, "app", "liveness", PROBE))
    assert (await custom.check(target, [], 30)).output == "first"
    assert caplog.text.count("Failed to load probe handler") == 2
    assert caplog.text.count("Ignored a second probe handler") == 1
