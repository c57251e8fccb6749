"""Starts and hooks in numbers."""

import asyncio
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from pykubelet.api.pod import Container, LifecycleHandler, Pod, PodSpec, SleepAction
from pykubelet.kuberuntime.kill import HookRunner
from pykubelet.kuberuntime.metrics import StartMetrics

POD = Pod(
    spec=PodSpec(
        containers=[Container(name="main")],
        init_containers=[Container(name="first")],
        ephemeral_containers=[Container(name="look")],
    )
)
USERS = Pod(spec=PodSpec(containers=[Container(name="main")], host_users=False))


def test_start_metrics_sandbox_starts_and_errors_counted() -> None:
    registry = CollectorRegistry()
    metrics = StartMetrics(registry)
    for pod, error in ((POD, None), (USERS, OSError), (POD, OSError), (USERS, asyncio.CancelledError)):
        try:
            with metrics.measure_sandbox_start(pod):
                if error is not None:
                    raise error
        except (OSError, asyncio.CancelledError):
            pass
    names = ("started_pods", "started_pods_errors", "started_user_namespaced_pods")
    counts = [registry.get_sample_value(f"kubelet_{name}_total") for name in names]
    assert counts == [4, 2, 2]
    assert registry.get_sample_value("kubelet_started_user_namespaced_pods_errors_total") == 1


def test_start_metrics_container_starts_counted_by_type() -> None:
    registry = CollectorRegistry()
    metrics = StartMetrics(registry)
    kinds = {"main": "container", "first": "init_container", "look": "ephemeral_container"}
    for name, kind in kinds.items():
        metrics.record_container_start(POD, Container(name=name))
        metrics.record_container_failure(POD, Container(name=name), "RunContainerError")
        labels = {"container_type": kind}
        assert registry.get_sample_value("kubelet_started_containers_total", labels) == 1
        labels["code"] = "RunContainerError"
        assert registry.get_sample_value("kubelet_started_containers_errors_total", labels) == 1


@pytest.mark.looptime
async def test_hook_runner_sleep_cancelled_counts_early_termination() -> None:
    registry = CollectorRegistry()
    nobody: Any = None  # a sleep asks nobody for anything
    hooks = HookRunner(nobody, nobody, nobody, StartMetrics(registry))
    sleep = LifecycleHandler(sleep=SleepAction(seconds=5))
    await hooks.run(POD, POD.spec.containers[0], "c1", sleep)
    assert registry.get_sample_value("kubelet_sleep_action_terminated_early_total") == 0
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(2):
            await hooks.run(POD, POD.spec.containers[0], "c1", sleep)
    assert registry.get_sample_value("kubelet_sleep_action_terminated_early_total") == 1
