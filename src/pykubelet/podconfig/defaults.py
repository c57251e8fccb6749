"""API defaults for static pods.

The API server sets them for its own pods. A pod from a file or a URL gets them here, so that the rest of the
kubelet handles pods of all sources the same. Explicit values are never changed, except that resource
quantities are rounded up to thousandths.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Literal

from pykubelet.api.meta import Resources
from pykubelet.api.names import image_repository_problem
from pykubelet.api.pod import Container, HTTPGetAction, Pod, PodSpec, Probe
from pykubelet.api.quantity import Quantity
from pykubelet.api.volume import EmptyDir, Volume

_IMAGE_ID = re.compile(r"[0-9a-f]{64}")
_NANOS_PER_MILLI = 10**6


def apply_defaults(pod: Pod) -> None:
    """Set the API defaults of a pod, in place."""
    spec = pod.spec
    spec.restart_policy = spec.restart_policy or "Always"
    spec.dns_policy = spec.dns_policy or "ClusterFirst"
    spec.scheduler_name = spec.scheduler_name or "default-scheduler"
    spec.service_account_name = spec.service_account_name or spec.service_account
    spec.service_account = spec.service_account_name
    if spec.termination_grace_period_seconds is None:
        spec.termination_grace_period_seconds = 30
    if spec.enable_service_links is None:
        spec.enable_service_links = True
    for volume in spec.volumes:
        _complete_volume(volume)
    for container in (*spec.containers, *spec.init_containers, *spec.ephemeral_containers):
        complete_container(container)
    for container in (*spec.containers, *spec.init_containers):
        container.resources.requests = {**container.resources.limits, **container.resources.requests}
        if spec.host_network:
            for port in container.ports:
                port.host_port = port.host_port or port.container_port
    _complete_pod_resources(spec)
    spec.overhead = _rounded(spec.overhead)


def default_pull_policy(image: str) -> Literal["Always", "IfNotPresent"]:
    """Return the default pull policy of an image: Always for the tag `latest`, which can move."""
    name, _, digest = image.partition("@")
    repository, colon, tag = name.rpartition(":")
    if not colon or "/" in tag:
        repository, tag = name, "" if digest else "latest"
    # The tag of an invalid image name is meaningless; the pull reports the error.
    readable = not image_repository_problem(repository) and not _IMAGE_ID.fullmatch(repository)
    return "Always" if tag == "latest" and readable else "IfNotPresent"


def container_total(spec: PodSpec, which: Literal["requests", "limits"]) -> Resources:
    """Return the sum of the containers' resources, computed as by the scheduler.

    Init containers run sequentially, so only the largest counts; sidecars (init containers with
    `restartPolicy: Always`) keep running and count for everything after them.
    """

    def resources_of(container: Container) -> Resources:
        amounts: Resources = getattr(container.resources, which)
        return amounts

    running = _sum(map(resources_of, spec.containers))
    sidecars: Resources = {}
    peak: Resources = {}
    for container in spec.init_containers:
        during = _sum((resources_of(container), sidecars))
        if container.restart_policy == "Always":
            sidecars = during
        peak = _larger(peak, during)
    return _larger(_sum((running, sidecars)), peak)


def _complete_volume(volume: Volume) -> None:
    if not volume.kinds:
        volume.empty_dir = EmptyDir()
    if volume.host_path is not None and volume.host_path.type is None:
        volume.host_path.type = ""


def complete_container(container: Container) -> None:
    """Set the defaults of a container of any type."""
    container.image_pull_policy = container.image_pull_policy or default_pull_policy(container.image)
    container.termination_message_path = container.termination_message_path or "/dev/termination-log"
    container.termination_message_policy = container.termination_message_policy or "File"
    container.resources.limits = _rounded(container.resources.limits)
    container.resources.requests = _rounded(container.resources.requests)
    for port in container.ports:
        port.protocol = port.protocol or "TCP"
    for variable in container.env:
        source = variable.value_from
        if source is not None and source.field_ref is not None:
            source.field_ref.api_version = source.field_ref.api_version or "v1"
        if source is not None and source.file_key_ref is not None and source.file_key_ref.optional is None:
            source.file_key_ref.optional = False
    for probe in (container.liveness_probe, container.readiness_probe, container.startup_probe):
        if probe is not None:
            _complete_probe(probe)
    if container.lifecycle is not None:
        for hook in (container.lifecycle.post_start, container.lifecycle.pre_stop):
            if hook is not None and hook.http_get is not None:
                _complete_request(hook.http_get)


def _complete_probe(probe: Probe) -> None:
    probe.timeout_seconds = probe.timeout_seconds or 1
    probe.period_seconds = probe.period_seconds or 10
    probe.success_threshold = probe.success_threshold or 1
    probe.failure_threshold = probe.failure_threshold or 3
    if probe.http_get is not None:
        _complete_request(probe.http_get)
    if probe.grpc is not None and probe.grpc.service is None:
        probe.grpc.service = ""


def _complete_request(request: HTTPGetAction) -> None:
    request.path = request.path or "/"
    request.scheme = request.scheme or "HTTP"


def _complete_pod_resources(spec: PodSpec) -> None:
    """Set the defaults of pod-level resources, if the pod has any."""
    pod_level = spec.resources
    if pod_level is None or not (pod_level.limits or pod_level.requests):
        return
    pod_level.limits, pod_level.requests = _rounded(pod_level.limits), _rounded(pod_level.requests)
    for name, amount in container_total(spec, "limits").items():
        if name.startswith("hugepages-") and name not in pod_level.requests:
            pod_level.limits.setdefault(name, amount)
    if pod_level.limits:
        for name, amount in container_total(spec, "requests").items():
            if name in ("cpu", "memory"):
                pod_level.requests.setdefault(name, amount)
        for name, amount in pod_level.limits.items():
            if name in ("cpu", "memory") or name.startswith("hugepages-"):
                pod_level.requests.setdefault(name, amount)


def _rounded(amounts: Resources) -> Resources:
    return {
        name: Quantity(amount.milli * _NANOS_PER_MILLI, amount.notation) for name, amount in amounts.items()
    }


def _sum(summands: Iterable[Resources]) -> Resources:
    total: Resources = {}
    for amounts in summands:
        for name, amount in amounts.items():
            known = total.get(name)
            total[name] = amount if known is None else Quantity(known.nanos + amount.nanos, known.notation)
    return total


def _larger(first: Resources, second: Resources) -> Resources:
    return {**first, **{name: max(amount, first.get(name, amount)) for name, amount in second.items()}}
