"""Labels and annotations of sandboxes and containers, by which the kubelet recognizes them after a restart.

The runtime is the only state that survives: the owner of a container, the spec that created it, its restart
count and how to stop it are in its labels and annotations. They are written as upstream writes them, and
parsed leniently, because they may come from an older kubelet, from another client or from an attacker.

The container hash is upstream's, bit for bit, so that a node can be switched between the two kubelets without
a restart of any container. It covers only the name and the image, which cannot change without a new
container. Values that other kubelets compare or hash must not differ in a space or an escape, so `to_go_json`
writes JSON as Go does, byte for byte.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from pykubelet.api.meta import from_json
from pykubelet.api.pod import Container, ContainerPort, HTTPGetAction, LifecycleHandler, Pod
from pykubelet.util.text import fnv1a_32

# Go escapes JSON for embedding in HTML and JavaScript.
_ESCAPED = str.maketrans({char: f"\\u{ord(char):04x}" for char in "<>&\u2028\u2029"})


def to_go_json(value: Any) -> str:
    """Return the JSON of a value as Go's encoder writes it; keys keep their order."""
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).translate(_ESCAPED)


def container_hash(container: Container) -> str:
    """Return the hash as written into the annotation: hexadecimal, no leading zeros."""
    document = to_go_json({"image": container.image, "name": container.name})
    # Upstream hashes a dump of the bytes, not the bytes themselves.
    dump = f"([]uint8)[{' '.join(map(str, document.encode(errors='replace')))}]"
    return f"{fnv1a_32(dump.encode()):x}"


T = TypeVar("T")
POD_NAME = "io.kubernetes.pod.name"
POD_NAMESPACE = "io.kubernetes.pod.namespace"
POD_UID = "io.kubernetes.pod.uid"
CONTAINER_NAME = "io.kubernetes.container.name"
HASH = "io.kubernetes.container.hash"
RESTART_COUNT = "io.kubernetes.container.restartCount"
TERMINATION_MESSAGE_PATH = "io.kubernetes.container.terminationMessagePath"
TERMINATION_MESSAGE_POLICY = "io.kubernetes.container.terminationMessagePolicy"
PRE_STOP = "io.kubernetes.container.preStopHandler"
PORTS = "io.kubernetes.container.ports"
DELETION_GRACE_PERIOD = "io.kubernetes.pod.deletionGracePeriod"
TERMINATION_GRACE_PERIOD = "io.kubernetes.pod.terminationGracePeriod"
_HASH_FORM = re.compile(r"0*([0-9a-f]{1,16})", re.ASCII | re.IGNORECASE)
_NUMBER_FORM = re.compile(r"[+-]?[0-9]{1,18}", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxInfo:
    """Owner and labels of a sandbox."""

    pod_name: str
    pod_namespace: str
    pod_uid: str
    labels: dict[str, str] = field(default_factory=dict)
    """Labels of the pod."""
    annotations: dict[str, str] = field(default_factory=dict)

    @property
    def is_managed(self) -> bool:
        """Whether a kubelet created it for a pod."""
        return all((self.pod_name, self.pod_namespace, self.pod_uid))


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerInfo:
    """Owner of a container, and the parts of its spec that are stored in annotations."""

    pod_name: str
    pod_namespace: str
    pod_uid: str
    name: str
    hash: str = ""
    """Container hash; empty when absent or invalid."""
    restart_count: int = 0
    termination_message_path: str = ""
    termination_message_policy: str = ""
    deletion_grace: int | None = None
    """`deletionGracePeriodSeconds` of the pod."""
    pod_grace: int | None = None
    """`terminationGracePeriodSeconds` of the pod, in seconds."""
    pre_stop: LifecycleHandler | None = None
    ports: tuple[ContainerPort, ...] = ()

    @property
    def is_managed(self) -> bool:
        """Whether a kubelet created it for a pod."""
        return all((self.pod_name, self.pod_namespace, self.pod_uid, self.name))


def sandbox_labels(pod: Pod) -> dict[str, str]:
    """Return the labels of a pod's sandbox: the pod's own and its identity."""
    return pod.metadata.labels | _identity(pod)


def sandbox_annotations(pod: Pod) -> dict[str, str]:
    """Return the annotations of a pod's sandbox."""
    return dict(pod.metadata.annotations)


def container_labels(pod: Pod, container: Container) -> dict[str, str]:
    """Return the labels of a container."""
    return _identity(pod) | {CONTAINER_NAME: container.name}


def container_annotations(
    pod: Pod, container: Container, restart_count: int, plugin_annotations: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Return the annotations of a container; they override `plugin_annotations`, those of device plugins."""
    annotations = dict(plugin_annotations or {})
    annotations |= {
        HASH: container_hash(container),
        RESTART_COUNT: str(restart_count),
        TERMINATION_MESSAGE_PATH: container.termination_message_path,
        TERMINATION_MESSAGE_POLICY: container.termination_message_policy,
    }
    if pod.metadata.deletion_grace_period_seconds is not None:
        annotations[DELETION_GRACE_PERIOD] = str(pod.metadata.deletion_grace_period_seconds)
    if pod.spec.termination_grace_period_seconds is not None:
        annotations[TERMINATION_GRACE_PERIOD] = str(pod.spec.termination_grace_period_seconds)
    if container.lifecycle is not None and container.lifecycle.pre_stop is not None:
        annotations[PRE_STOP] = to_go_json(_handler_document(container.lifecycle.pre_stop))
    if container.ports:
        annotations[PORTS] = to_go_json([_port_document(port) for port in container.ports])
    return annotations


def parse_sandbox(labels: Mapping[str, str], annotations: Mapping[str, str]) -> SandboxInfo:
    """Parse the labels of a sandbox; `is_managed` is False if it does not belong to a pod."""
    pod_labels = {
        key: value for key, value in labels.items() if key not in (POD_NAME, POD_NAMESPACE, POD_UID)
    }
    return SandboxInfo(
        pod_name=labels.get(POD_NAME, ""),
        pod_namespace=labels.get(POD_NAMESPACE, ""),
        pod_uid=labels.get(POD_UID, ""),
        labels=pod_labels,
        annotations=dict(annotations),
    )


def parse_container(labels: Mapping[str, str], annotations: Mapping[str, str]) -> ContainerInfo:
    """Parse the labels and annotations of a container; `is_managed` is False if it does not belong to a pod.

    Missing or invalid values take the default of their field.
    """
    hash_form = _HASH_FORM.fullmatch(annotations.get(HASH, ""))
    return ContainerInfo(
        pod_name=labels.get(POD_NAME, ""),
        pod_namespace=labels.get(POD_NAMESPACE, ""),
        pod_uid=labels.get(POD_UID, ""),
        name=labels.get(CONTAINER_NAME, ""),
        hash=hash_form[1].lower() if hash_form else "",
        restart_count=max(0, _number(annotations, RESTART_COUNT) or 0),
        termination_message_path=annotations.get(TERMINATION_MESSAGE_PATH, ""),
        termination_message_policy=annotations.get(TERMINATION_MESSAGE_POLICY, ""),
        deletion_grace=_number(annotations, DELETION_GRACE_PERIOD),
        pod_grace=_number(annotations, TERMINATION_GRACE_PERIOD),
        pre_stop=_parse(LifecycleHandler, annotations.get(PRE_STOP)),
        ports=tuple(_parse(list[ContainerPort], annotations.get(PORTS)) or ()),
    )


def _identity(pod: Pod) -> dict[str, str]:
    meta = pod.metadata
    return {POD_NAME: meta.name, POD_NAMESPACE: meta.namespace, POD_UID: meta.uid}


def _number(annotations: Mapping[str, str], key: str) -> int | None:
    text = annotations.get(key, "")
    return int(text) if _NUMBER_FORM.fullmatch(text) else None


def _parse(kind: type[T], text: str | None) -> T | None:
    if text is None:
        return None
    try:
        return from_json(kind, text.encode())
    except (ValueError, RecursionError):
        return None


def _port_document(port: ContainerPort) -> dict[str, Any]:
    document = {
        "name": port.name,
        "hostPort": port.host_port,
        "containerPort": port.container_port,
        "protocol": port.protocol,
        "hostIP": port.host_ip,
    }
    return {key: value for key, value in document.items() if value or key == "containerPort"}


def _handler_document(handler: LifecycleHandler) -> dict[str, Any]:
    document: dict[str, Any] = {}
    if handler.exec is not None:
        document["exec"] = {"command": handler.exec.command} if handler.exec.command else {}
    if handler.http_get is not None:
        document["httpGet"] = _http_document(handler.http_get)
    if handler.tcp_socket is not None:
        document["tcpSocket"] = {"port": handler.tcp_socket.port} | (
            {"host": handler.tcp_socket.host} if handler.tcp_socket.host else {}
        )
    if handler.sleep is not None:
        document["sleep"] = {"seconds": handler.sleep.seconds}
    return document


def _http_document(action: HTTPGetAction) -> dict[str, Any]:
    document = {
        "path": action.path,
        "port": action.port,
        "host": action.host,
        "scheme": action.scheme,
        "httpHeaders": [{"name": header.name, "value": header.value} for header in action.http_headers],
    }
    return {key: value for key, value in document.items() if value or key == "port"}
