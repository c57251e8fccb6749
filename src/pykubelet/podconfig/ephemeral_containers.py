"""Ephemeral containers that `pykubelet debug` adds to running pods of a standalone node.

They have the rules of the API server's subresource `ephemeralcontainers`: a name that no other container of
the pod has, no ports, probes, hooks, resources or restart policy, mounts without a sub-path, and no removal.
The manifest does not change: the mux adds them to the pod until its source removes it or this process ends.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from pykubelet.api.pod import Container, Pod
from pykubelet.config.errors import Problem
from pykubelet.podconfig.defaults import complete_container
from pykubelet.podconfig.validate_container import check_container

MAX_EPHEMERAL_CONTAINERS = 10
"""Ephemeral containers of one pod; none can be removed."""
_PATH = "ephemeralContainer"
_FORBIDDEN = (
    ("ports", "ports"),
    ("livenessProbe", "liveness_probe"),
    ("readinessProbe", "readiness_probe"),
    ("startupProbe", "startup_probe"),
    ("lifecycle", "lifecycle"),
    ("resizePolicy", "resize_policy"),
    ("restartPolicy", "restart_policy"),
    ("restartPolicyRules", "restart_policy_rules"),
)


class EphemeralContainerRejected(Exception):
    """Raised when a pod cannot have an ephemeral container; the text is the reason."""


def completed_ephemeral_container(pod: Pod, container: Container) -> Container:
    """Return a copy with defaults. Raises EphemeralContainerRejected with every problem."""
    if len(pod.spec.ephemeral_containers) >= MAX_EPHEMERAL_CONTAINERS:
        raise EphemeralContainerRejected(
            f"the pod has {MAX_EPHEMERAL_CONTAINERS} ephemeral containers, which is the maximum: "
            "they go when its manifest is removed or the kubelet is restarted"
        )
    found = msgspec.structs.replace(container)
    complete_container(found)
    if problems := list(_problems(pod, found)):
        raise EphemeralContainerRejected("; ".join(map(str, problems)))
    return found


def _problems(pod: Pod, container: Container) -> Iterator[Problem]:
    yield from check_container(_PATH, container, pod.spec, is_init=False)
    others = {other.name for other in (*pod.spec.containers, *pod.spec.init_containers)}
    if container.name in others | {other.name for other in pod.spec.ephemeral_containers}:
        yield Problem(f"{_PATH}.name", f"{container.name!r} is the name of another container of the pod")
    if container.target_container_name and container.target_container_name not in others:
        path = f"{_PATH}.targetContainerName"
        yield Problem(path, f"the pod has no container {container.target_container_name!r}")
    resources = container.resources
    forbidden = [name for name, field in _FORBIDDEN if getattr(container, field)]
    if resources.limits or resources.requests or resources.claims:
        forbidden.append("resources")
    for name in forbidden:
        yield Problem(f"{_PATH}.{name}", "must not be set for an ephemeral container")
    for index, mount in enumerate(container.volume_mounts):
        if mount.sub_path or mount.sub_path_expr:
            yield Problem(f"{_PATH}.volumeMounts[{index}]", "must not have a subPath or subPathExpr")
