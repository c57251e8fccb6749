"""Admission handlers that reject pods which need a feature that this node does not support.

The scheduler avoids such nodes by the features that the node declares; a pod that was bound by hand, or by a
scheduler without that knowledge, is rejected here instead of being run without the feature.

- `PodLevelResources`, `DeclaredFeatures`: pod-level resources, and declared features such as a
  user namespace together with hostNetwork.
- `AppArmor`: a pod with a profile must not run unconfined. The runtime looks up the node's profiles when the
  container starts; whether the kernel enforces AppArmor, and whether a profile has a name, is checked here.
- `SupplementalGroups`: `supplementalGroupsPolicy: Strict`, which not every runtime implements.
- `Sysctls`: only safe sysctls and `allowedUnsafeSysctls`. A sysctl is safe if it belongs to the pod's own
  namespaces and does not affect others. One of a namespace that the pod shares with the host would change the
  host, so it is rejected even if it is allowed.
- `OperatingSystem`: pods for another operating system, by their label or their `os` field.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

from pykubelet.admission.handler import AdmitHandlerDeps, AdmitRejection, PodAdmitAttributes
from pykubelet.api.meta import Resources
from pykubelet.api.names import namespace_of, normal_name
from pykubelet.api.pod import Pod, PodSpec, Profile, is_sidecar

POD_LEVEL_REASON = "PodLevelResourcesNotSupported"
DECLARED_REASON = "PodFeatureUnsupported"


class PodLevelResources:
    """Rejects pod-level resources while the feature gate is off, because they would not be enforced."""

    for_running = False

    def __init__(self, deps: AdmitHandlerDeps) -> None:
        self._enabled = deps.gates.enabled("PodLevelResources")

    def admit(self, attempt: PodAdmitAttributes) -> AdmitRejection | None:
        """Reject a pod with pod-level requests or limits."""
        pod_resources = attempt.pod.spec.resources
        if (
            self._enabled
            or pod_resources is None
            or not (_counts(pod_resources.requests) or _counts(pod_resources.limits))
        ):
            return None
        return AdmitRejection(POD_LEVEL_REASON, "PodLevelResources feature gate is disabled")


class DeclaredFeatures:
    """Rejects pods that need a feature which the node does not declare."""

    for_running = False

    def __init__(self, deps: AdmitHandlerDeps) -> None:
        self._enabled = deps.gates.enabled("NodeDeclaredFeatures")

    def admit(self, attempt: PodAdmitAttributes) -> AdmitRejection | None:
        """Reject a pod that needs a feature missing from the node's `declaredFeatures`."""
        if not self._enabled:
            return None
        missing = needed_features(attempt.pod) - set(attempt.node.status.declared_features)
        if not missing:
            return None
        return AdmitRejection(DECLARED_REASON, lacking(missing))


def lacking(features: Iterable[str]) -> str:
    """Return the message for features that the pod needs and the node does not have."""
    return f"Pod requires node features that are not available: {', '.join(sorted(features))}"


def needed_features(pod: Pod) -> set[str]:
    """Return the features without which the pod would not run as its spec requires."""
    return {name for name, is_needed in _NEEDS.items() if is_needed(pod)}


def features_of_update(before: Pod, after: Pod) -> set[str]:
    """Return the features that are needed to apply an update of a running pod."""
    found = set()
    if before.spec.resources != after.spec.resources:
        found.add("InPlacePodLevelResourcesVerticalScaling")
    old = {container.name: container.resources for container in before.spec.init_containers}
    if any(
        container.resources != old.get(container.name, container.resources)
        for container in after.spec.init_containers
        if not is_sidecar(container)
    ):
        found.add("InPlacePodVerticalScalingInitContainers")
    return found


def _restarts_all(pod: Pod) -> bool:
    containers = (*pod.spec.init_containers, *pod.spec.containers)
    return any(
        rule.action == "RestartAllContainers"
        for container in containers
        for rule in container.restart_policy_rules
    )


_NEEDS: Mapping[str, Callable[[Pod], bool]] = {
    "RestartAllContainersOnContainerExits": _restarts_all,
    "UserNamespacesHostNetworkSupport": lambda pod: pod.spec.host_network and pod.spec.host_users is False,
}


def _counts(amounts: Resources) -> bool:
    """Return whether any of these resources is supported at pod level."""
    return any(name in ("cpu", "memory") or name.startswith("hugepages-") for name in amounts)


APPARMOR_REASON = "AppArmor"
ANNOTATION_PREFIX = "container.apparmor.security.beta.kubernetes.io/"


class AppArmor:
    """Rejects AppArmor profiles if AppArmor is not enabled, and Localhost profiles without a name."""

    for_running = False

    def __init__(self, deps: AdmitHandlerDeps) -> None:
        self._enabled = deps.apparmor

    def admit(self, attempt: PodAdmitAttributes) -> AdmitRejection | None:
        """Check the profiles of a pod whose phase is still Pending."""
        pod = attempt.pod
        if pod.status.phase != "Pending" or not _wants_confinement(pod):
            return None
        if not self._enabled:
            return _rejection("AppArmor is not enabled on the host")
        for profile in _profiles(pod):
            if profile.type == "Localhost" and not (profile.localhost_profile or "").strip():
                # Formatted as upstream formats the object.
                name = "nil" if profile.localhost_profile is None else f"*{profile.localhost_profile}"
                written = f"&AppArmorProfile{{Type:Localhost,LocalhostProfile:{name},}}"
                return _rejection(f'invalid empty AppArmor profile name: "{written}"')
        return None


def apparmor_is_enabled(sys: Path = Path("/sys")) -> bool:
    """Return whether the running kernel enforces AppArmor profiles."""
    try:
        return (sys / "kernel/security/apparmor").exists() and (
            sys / "module/apparmor/parameters/enabled"
        ).read_text().startswith("Y")
    except OSError:
        return False


def _rejection(problem: str) -> AdmitRejection:
    return AdmitRejection(APPARMOR_REASON, f"Cannot enforce AppArmor: {problem}")


def _wants_confinement(pod: Pod) -> bool:
    return any(profile.type != "Unconfined" for profile in _written(pod)) or any(
        value != "unconfined"
        for key, value in pod.metadata.annotations.items()
        if key.startswith(ANNOTATION_PREFIX)
    )


def _written(pod: Pod) -> Iterator[Profile]:
    """Yield all profiles of the spec, effective or not."""
    spec = pod.spec
    if spec.security_context.app_armor_profile is not None:
        yield spec.security_context.app_armor_profile
    for container in (*spec.init_containers, *spec.containers, *spec.ephemeral_containers):
        if (
            container.security_context is not None
            and container.security_context.app_armor_profile is not None
        ):
            yield container.security_context.app_armor_profile


def _profiles(pod: Pod) -> Iterator[Profile]:
    """Yield the effective profile of each container: its own, the annotated one, or the pod's."""
    spec = pod.spec
    for container in (*spec.init_containers, *spec.containers, *spec.ephemeral_containers):
        own = container.security_context.app_armor_profile if container.security_context is not None else None
        text = pod.metadata.annotations.get(ANNOTATION_PREFIX + container.name)
        profile = own or _annotated(text) or spec.security_context.app_armor_profile
        if profile is not None:
            yield profile


def _annotated(text: str | None) -> Profile | None:
    """Parse the deprecated AppArmor annotation, which static pods may still use."""
    if text == "runtime/default":
        return Profile(type="RuntimeDefault")
    if text == "unconfined":
        return Profile(type="Unconfined")
    if text is not None and text.startswith("localhost/"):
        return Profile(type="Localhost", localhost_profile=text.removeprefix("localhost/"))
    return None


class SupplementalGroups:
    """Rejects `supplementalGroupsPolicy: Strict` if the runtime does not support it."""

    for_running = False

    def admit(self, attempt: PodAdmitAttributes) -> AdmitRejection | None:
        """Compare the pod's policy with the runtime features in the node's status."""
        features = attempt.node.status.features
        known = features is not None and features.supplemental_groups_policy is True
        if attempt.pod.spec.security_context.supplemental_groups_policy != "Strict" or known:
            return None
        return AdmitRejection(
            "SupplementalGroupsPolicyNotSupported",
            "SupplementalGroupsPolicy=Strict is not supported in this node",
        )


SYSCTL_FORBIDDEN = "SysctlForbidden"
_SAFE: dict[str, tuple[int, int]] = {
    "kernel.shm_rmid_forced": (0, 0),
    "net.ipv4.ip_local_port_range": (0, 0),
    "net.ipv4.tcp_syncookies": (0, 0),
    "net.ipv4.ping_group_range": (0, 0),
    "net.ipv4.ip_unprivileged_port_start": (0, 0),
    "net.ipv4.ip_local_reserved_ports": (3, 16),
    "net.ipv4.tcp_keepalive_time": (4, 5),
    "net.ipv4.tcp_fin_timeout": (4, 6),
    "net.ipv4.tcp_keepalive_intvl": (4, 5),
    "net.ipv4.tcp_keepalive_probes": (4, 5),
    "net.ipv4.tcp_rmem": (4, 15),
    "net.ipv4.tcp_wmem": (4, 15),
}
"""Safe sysctls, each with the first kernel version in which it is namespaced per network namespace."""


class Sysctls:
    """Rejects pods with sysctls that they must not set."""

    for_running = False

    def __init__(self, deps: AdmitHandlerDeps) -> None:
        self._kernel = deps.kernel
        self.set_allowed(deps.allowed_sysctls)

    def set_allowed(self, allowed: Iterable[str]) -> None:
        """Replace `allowedUnsafeSysctls` (names, or prefixes followed by `*`) for pods admitted later."""
        patterns = [normal_name(pattern) for pattern in (*safe_sysctls(self._kernel), *allowed)]
        self._names = frozenset(pattern for pattern in patterns if not pattern.endswith("*"))
        self._prefixes = tuple(pattern.removesuffix("*") for pattern in patterns if pattern.endswith("*"))

    def admit(self, attempt: PodAdmitAttributes) -> AdmitRejection | None:
        """Reject the pod for its first sysctl that is not allowed."""
        spec = attempt.pod.spec
        problems = (self._problem(sysctl.name, spec) for sysctl in spec.security_context.sysctls)
        first = next((problem for problem in problems if problem is not None), None)
        return AdmitRejection(SYSCTL_FORBIDDEN, f"forbidden sysctl: {first}") if first is not None else None

    def _problem(self, written: str, spec: PodSpec) -> str | None:
        name = normal_name(written)
        if name not in self._names and not name.startswith(self._prefixes):
            return f'"{name}" not allowlisted'
        shared = {"IPC": spec.host_ipc, "Net": spec.host_network}
        namespace = namespace_of(name) or ""
        return f'"{name}" not allowed with host {namespace} enabled' if shared.get(namespace) else None


def safe_sysctls(kernel: str) -> Iterable[str]:
    """Return the sysctls that are safe on this kernel release; the minimal set for an unknown one."""
    numbers = re.match(r"(\d+)\.(\d+)", kernel)
    version = (int(numbers[1]), int(numbers[2])) if numbers else (0, 0)
    return [name for name, first in _SAFE.items() if version >= first]


OS_LABEL = "kubernetes.io/os"
OURS = "linux"


class OperatingSystem:
    """Rejects pods for another operating system, whatever label the node has."""

    for_running = False

    def admit(self, attempt: PodAdmitAttributes) -> AdmitRejection | None:
        """Check the pod's label, then its `os` field."""
        if attempt.pod.metadata.labels.get(OS_LABEL, OURS) != OURS:
            return AdmitRejection(
                "PodOSSelectorNodeLabelDoesNotMatch",
                "Failed to admit pod as the `kubernetes.io/os` label doesn't match node label",
            )
        pod_os = attempt.pod.spec.os
        if pod_os is not None and pod_os.name != OURS:
            return AdmitRejection(
                "PodOSNotSupported", "Failed to admit pod as the OS field doesn't match node OS"
            )
        return None
