"""Pods and manifests for tests."""

from collections.abc import Callable
from typing import Any

import yaml

from pykubelet.api.meta import from_document
from pykubelet.api.pod import Pod
from pykubelet.config.errors import Problem
from pykubelet.podconfig.static_pods import complete_static_pod

NODE = "node-1"
NOW = 1_700_000_000_123_456_789


def document(name: str = "web", **spec: Any) -> dict[str, Any]:
    """A good manifest; `spec` replaces or adds fields of its spec."""
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name},
        "spec": {"containers": [{"name": "main", "image": "busybox:1.35"}], **spec},
    }


def manifest(name: str = "web", **spec: Any) -> str:
    return yaml.dump(document(name, **spec), Dumper=yaml.CSafeDumper)


def written(name: str = "web", **spec: Any) -> Pod:
    return from_document(Pod, document(name, **spec))


def static(name: str = "web", **spec: Any) -> Pod:
    return complete_static_pod(
        written(name, **spec), source="file", origin=f"/m/{name}.yaml", node_name=NODE, now=NOW
    )


class Heard:
    """An emit function that remembers."""

    def __init__(self) -> None:
        self.sets: list[tuple[list[Pod], list[Problem]]] = []

    def __call__(self, source: str, pods: list[Pod], problems: list[Problem]) -> None:
        self.source = source
        self.sets.append((pods, problems))

    @property
    def names(self) -> list[str]:
        return [pod.metadata.name for pod in self.sets[-1][0]] if self.sets else []

    @property
    def problems(self) -> list[str]:
        return [str(problem) for problem in self.sets[-1][1]]

    def hostname_is(self, name: str) -> Callable[[], bool]:
        """Say, when called, whether the first pod of the last set has this hostname."""
        return lambda: bool(self.sets[-1][0]) and self.sets[-1][0][0].spec.hostname == name
