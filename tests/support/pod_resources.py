"""Pods for tables, with resources written as in a manifest."""

import uuid
from typing import Any

from pykubelet.api.meta import Resources, from_document
from pykubelet.api.pod import Pod
from pykubelet.api.quantity import Quantity
from pykubelet.podconfig.defaults import apply_defaults


def pod_of(*resources: dict[str, Any], init: list[dict[str, Any]] | None = None, **spec: Any) -> Pod:
    """A pod, with defaults, whose containers have these resources."""

    def containers(kind: str, parts: Any) -> list[dict[str, Any]]:
        return [{"name": f"{kind}{i}", "image": "i", "resources": part} for i, part in enumerate(parts)]

    spec |= {"containers": containers("c", resources), "initContainers": containers("i", init or [])}
    uid = str(uuid.uuid4())
    pod = from_document(Pod, {"metadata": {"name": "p", "namespace": "default", "uid": uid}, "spec": spec})
    apply_defaults(pod)
    return pod


def amounts(**values: str) -> Resources:
    """Resources: `memory="1Gi"`, with `_` for `-`."""
    return {name.replace("_", "-"): Quantity.parse(value) for name, value in values.items()}
