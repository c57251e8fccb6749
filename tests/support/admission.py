"""Pods, nodes and surroundings for tests of admission, in a few words."""

from typing import Any

import msgspec

from pykubelet.admission.handler import AdmitHandlerDeps, Amounts, PodAdmitAttributes
from pykubelet.admission.predicates import as_amounts
from pykubelet.api.meta import Resources
from pykubelet.api.node import Node
from pykubelet.api.pod import Pod
from pykubelet.api.quantity import Quantity
from pykubelet.apiserver.client import read_object
from pykubelet.cm.qos import pod_requests, qos_class
from pykubelet.config.feature_gates import FeatureGates


def resources(**texts: str) -> Resources:
    return {name.replace("_", "-"): Quantity.parse(text) for name, text in texts.items()}


def pod(name: str = "web", *, source: str = "api", meta: dict[str, Any] | None = None, **spec: Any) -> Pod:
    """A pod as its manifest says; without containers it has one without requests."""
    annotations = {"kubernetes.io/config.source": source, **(meta or {}).pop("annotations", {})}
    document = {
        "metadata": {
            "name": name,
            "namespace": "ns",
            "uid": name,
            "annotations": annotations,
            **(meta or {}),
        },
        "spec": {"containers": [{"name": "main"}], "nodeName": "n1", **spec},
        "status": {"phase": "Pending"},
    }
    return read_object(Pod, msgspec.json.encode(document))


def asking(name: str = "web", /, *, limits: bool = False, priority: int | None = None, **texts: str) -> Pod:
    """A pod that asks for this; names have `_` for `-`, and `dongle` is an extended resource."""
    wanted = {_name(key): text for key, text in texts.items()}
    amounts = {"requests": wanted, **({"limits": wanted} if limits else {})}
    return pod(name, containers=[{"name": "main", "resources": amounts}], priority=priority)


def node(labels: dict[str, str] | None = None, **texts: str) -> Node:
    """A node of two cpus, by default."""
    amounts = {"cpu": "2", "memory": "1Gi", "ephemeral_storage": "10Gi", "pods": "3", **texts}
    document = {
        "metadata": {"name": "n1", "labels": {"kubernetes.io/os": "linux", **(labels or {})}},
        "status": {"allocatable": {_name(key): text for key, text in amounts.items()}},
    }
    return read_object(Node, msgspec.json.encode(document))


def requests_of(one: Pod) -> Amounts:
    return as_amounts(pod_requests(one))


def surroundings(gates: dict[str, bool] | None = None, **facts: Any) -> AdmitHandlerDeps:
    facts = {"kernel": "6.1.0-13-amd64", **facts}
    return AdmitHandlerDeps(
        requests_of=requests_of, class_of=qos_class, gates=FeatureGates(overrides=gates or {}), **facts
    )


def attempt(one: Pod, *others: Pod, at: Node | None = None, running: bool = False) -> PodAdmitAttributes:
    return PodAdmitAttributes(pod=one, node=at or node(), other_pods=others, running=running)


def _name(key: str) -> str:
    return "example.com/dongle" if key == "dongle" else key.replace("_", "-")
