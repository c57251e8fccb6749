"""Pods and containers for tables, written as in a manifest."""

from typing import Any

from pykubelet.api.meta import ObjectMeta, Resources
from pykubelet.api.pod import Container, Pod, PodSpec
from pykubelet.api.quantity import Quantity
from pykubelet.kuberuntime.configuration.options import RunContainerOptions, RuntimeNodeOptions


def make_container(name: str = "main", **fields: Any) -> Container:
    """A container."""
    fields.setdefault("image", "registry.local/busybox:1.35")
    return Container(name=name, **fields)


def make_pod(*containers: Container, **fields: Any) -> Pod:
    """A pod; the fields are those of its metadata and spec."""
    metadata = {key: fields.pop(key) for key in list(fields) if key in ObjectMeta.__struct_fields__}
    metadata = {"name": "web", "namespace": "shop", "uid": "u-1"} | metadata
    fields.setdefault("dns_policy", "ClusterFirst")
    return Pod(
        metadata=ObjectMeta(**metadata),
        spec=PodSpec(containers=list(containers or [make_container()]), **fields),
    )


def make_facts(**fields: Any) -> RunContainerOptions:
    """Facts of a container on a plain node."""
    fields.setdefault("node", RuntimeNodeOptions())
    return RunContainerOptions(**fields)


def amounts(**values: str) -> Resources:
    """Resources: `memory="1Gi"`, with `_` for `-`."""
    return {name.replace("_", "-"): Quantity.parse(value) for name, value in values.items()}
