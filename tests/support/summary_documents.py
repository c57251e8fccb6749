"""Documents of the Summary API for tests, from the values that a test is about."""

from collections.abc import Iterable, Mapping
from typing import Any

Document = dict[str, Any]
_REFERENCE = {"name": "", "namespace": "", "uid": ""}
_TIMED = ("cpu", "memory", "io", "swap", "fs", "rootfs", "logs", "ephemeral-storage", "rlimit")


def summary_document(pods: Iterable[Mapping[str, Any]] = (), **node: Any) -> Document:
    """Return a summary of pods and a node, with the fields that the API always has."""
    return {"node": {"nodeName": "", **_stats(node)}, "pods": [_pod(pod) for pod in pods]}


def network_document(network: Mapping[str, Any]) -> Document:
    """Return network statistics with the fields that the API always has."""
    interfaces = [{"name": "", **interface} for interface in network.get("interfaces", ())]
    return {"time": None, "name": "", **network, "interfaces": interfaces}


def _pod(pod: Mapping[str, Any]) -> Document:
    return _stats(pod) | {
        "podRef": _REFERENCE | pod.get("podRef", {}),
        "containers": [{"name": "", **_stats(container)} for container in pod.get("containers", ())],
    }


def _stats(stats: Mapping[str, Any]) -> Document:
    found: Document = {"startTime": None, **stats}
    for name in _TIMED:
        if name in found:
            found[name] = {"time": None, **found[name]}
    if "network" in found:
        found["network"] = network_document(found["network"])
    return found
