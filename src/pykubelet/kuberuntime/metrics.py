"""Metrics of starts of pods and containers, and of lifecycle hooks; names and labels are upstream's.

Every attempt counts as started; failed ones also count as errors, by the reason in the container status.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Literal

from prometheus_client import CollectorRegistry, Counter

from pykubelet.api.pod import Container, Pod

ContainerType = Literal["container", "init_container", "ephemeral_container"]


class StartMetrics:
    """Start metrics of one kubelet; without a registry they are not exported."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        self._pods = Counter("kubelet_started_pods_total", "Attempts to start a sandbox.", registry=registry)
        self._pod_errors = Counter(
            "kubelet_started_pods_errors_total", "Failed attempts to start a sandbox.", registry=registry
        )
        self._user_namespaces = Counter(
            "kubelet_started_user_namespaced_pods_total",
            "Attempts to start a sandbox with a user namespace.",
            registry=registry,
        )
        self._user_namespace_errors = Counter(
            "kubelet_started_user_namespaced_pods_errors_total",
            "Failed attempts to start a sandbox with a user namespace.",
            registry=registry,
        )
        self._containers = Counter(
            "kubelet_started_containers_total",
            "Attempts to start a container.",
            ["container_type"],
            registry=registry,
        )
        self._container_errors = Counter(
            "kubelet_started_containers_errors_total",
            "Failed attempts to start a container, by reason.",
            ["container_type", "code"],
            registry=registry,
        )
        self._image_volumes = Counter(
            "kubelet_image_volume_requested_total", "Requested image volumes.", registry=registry
        )
        self._image_volume_mounts = Counter(
            "kubelet_image_volume_mounted_succeed_total", "Mounted image volumes.", registry=registry
        )
        self._image_volume_errors = Counter(
            "kubelet_image_volume_mounted_errors_total",
            "Image volumes that failed to mount.",
            registry=registry,
        )
        self._fallbacks = Counter(
            "kubelet_lifecycle_handler_http_fallbacks_total",
            "HTTPS requests of lifecycle hooks that fell back to HTTP.",
            registry=registry,
        )
        self._sleeps_cut = Counter(
            "kubelet_sleep_action_terminated_early_total",
            "Sleep actions of lifecycle hooks that ended early.",
            registry=registry,
        )

    @contextmanager
    def measure_sandbox_start(self, pod: Pod) -> Iterator[None]:
        """Count the start of a pod's sandbox; it has failed when the context raises."""
        namespaced = pod.spec.host_users is False
        self._pods.inc()
        if namespaced:
            self._user_namespaces.inc()
        try:
            yield
        except Exception:
            # A cancelled start is not a failure.
            self._pod_errors.inc()
            if namespaced:
                self._user_namespace_errors.inc()
            raise

    def record_container_start(self, pod: Pod, container: Container) -> None:
        """Count the start of a container."""
        self._containers.labels(container_type(pod, container.name)).inc()

    def record_container_failure(self, pod: Pod, container: Container, reason: str) -> None:
        """Count a failed start of a container, by reason."""
        self._container_errors.labels(container_type(pod, container.name), reason).inc()

    def record_image_volumes(self, container: Container, names: Collection[str], *, failed: bool) -> None:
        """Count the image volumes of a container that the runtime was called to create, and their mounts.

        `failed` is whether the runtime could not mount an image volume; all mounts count as failed then.
        """
        self._image_volumes.inc(len(names))
        mounts = sum(mount.name in names for mount in container.volume_mounts)
        (self._image_volume_errors if failed else self._image_volume_mounts).inc(mounts)

    def fell_back(self) -> None:
        """Count a hook's request that succeeded over HTTP after HTTPS had failed."""
        self._fallbacks.inc()

    def sleep_cut_short(self) -> None:
        """Count a sleep hook that was terminated early."""
        self._sleeps_cut.inc()


def container_type(pod: Pod, name: str) -> ContainerType:
    """Return the type of a container for metrics."""
    if any(container.name == name for container in pod.spec.containers):
        return "container"
    if any(container.name == name for container in pod.spec.init_containers):
        return "init_container"
    return "ephemeral_container"
