"""How often pods and containers were started, and how that and their hooks went: the reference's metrics.

Every attempt counts as started; those that fail count as errors, too, by the reason that users see.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

from prometheus_client import CollectorRegistry, Counter

from pykubelet.api.pod import Container, Pod

ContainerType = Literal["container", "init_container", "ephemeral_container"]


class StartMetrics:
    """The starts of one agent; without a registry nobody sees the numbers."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        self._pods = Counter("kubelet_started_pods_total", "Sandboxes that were to start.", registry=registry)
        self._pod_errors = Counter(
            "kubelet_started_pods_errors_total", "Sandboxes that could not be started.", registry=registry
        )
        self._user_namespaces = Counter(
            "kubelet_started_user_namespaced_pods_total",
            "Sandboxes with a user namespace that were to start.",
            registry=registry,
        )
        self._user_namespace_errors = Counter(
            "kubelet_started_user_namespaced_pods_errors_total",
            "Sandboxes with a user namespace that could not be started.",
            registry=registry,
        )
        self._containers = Counter(
            "kubelet_started_containers_total",
            "Containers that were to start.",
            ["container_type"],
            registry=registry,
        )
        self._container_errors = Counter(
            "kubelet_started_containers_errors_total",
            "Containers that could not be started, by reason.",
            ["container_type", "code"],
            registry=registry,
        )
        self._fallbacks = Counter(
            "kubelet_lifecycle_handler_http_fallbacks_total",
            "Requests of hooks that were answered without TLS although it was asked for.",
            registry=registry,
        )
        self._sleeps_cut = Counter(
            "kubelet_sleep_action_terminated_early_total",
            "Sleeps of hooks that were cut short.",
            registry=registry,
        )

    @contextmanager
    def sandbox(self, pod: Pod) -> Iterator[None]:
        """Count the start of a pod's sandbox; it failed when the block raises."""
        namespaced = pod.spec.host_users is False
        self._pods.inc()
        if namespaced:
            self._user_namespaces.inc()
        try:
            yield
        except Exception:
            # A start that is cancelled is none that failed.
            self._pod_errors.inc()
            if namespaced:
                self._user_namespace_errors.inc()
            raise

    def container(self, pod: Pod, container: Container) -> None:
        """Count the start of a container."""
        self._containers.labels(container_type(pod, container.name)).inc()

    def container_failed(self, pod: Pod, container: Container, reason: str) -> None:
        """Count a start that failed."""
        self._container_errors.labels(container_type(pod, container.name), reason).inc()

    def fell_back(self) -> None:
        """Count a hook's request that was answered without TLS."""
        self._fallbacks.inc()

    def sleep_cut_short(self) -> None:
        """Count a hook's sleep that did not last as long as it should."""
        self._sleeps_cut.inc()


def container_type(pod: Pod, name: str) -> ContainerType:
    """Give what kind of container of a pod this is, as metrics call it."""
    if any(container.name == name for container in pod.spec.containers):
        return "container"
    if any(container.name == name for container in pod.spec.init_containers):
        return "init_container"
    return "ephemeral_container"
