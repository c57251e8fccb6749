"""Builds and starts the statistics: what is sampled on this node, and the sources of the endpoints.

`NodeTargets` tells the collector which cgroups belong to the node and to its pods. Once a second it compares
the pods that the workers have observed with those it has seen; only a pod that has changed costs more than a
comparison.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Sequence

from pykubelet.api.pod import Pod
from pykubelet.cm.cgroups.driver import CgroupError
from pykubelet.kuberuntime.observed import ObservedPod
from pykubelet.logs import get_logger
from pykubelet.stats.collector import NODE, TICK_SECONDS, Collector
from pykubelet.stats.samples import Target

log = get_logger(__name__)
_PREFIXES = {"containerd": "cri-containerd-", "cri-o": "crio-"}
"""Prefix of the names of containers' cgroups by runtime, with the systemd driver."""


def container_cgroup(parent: str, runtime_id: str, driver: str, runtime: str) -> str:
    """Return the path of the cgroup of a container or sandbox, as its runtime names it."""
    name = runtime_id
    if driver == "systemd":
        name = f"{_PREFIXES.get(runtime, '')}{runtime_id}.scope"
    elif runtime == "cri-o":
        name = f"{_PREFIXES[runtime]}{runtime_id}"
    return f"{parent.rstrip('/')}/{name}"


def pod_targets(
    observed: ObservedPod, parent: str, name_of: Callable[[str, str], str], sandbox_image: str
) -> Iterator[Target]:
    """Yield the targets of a pod whose cgroup is `parent`: itself, its sandbox and its running containers."""
    whose = {"namespace": observed.namespace, "pod": observed.name, "pod_uid": observed.uid}
    sandbox = next((sandbox for sandbox in observed.sandboxes if sandbox.ready), None)
    if parent and observed.is_alive:
        yield Target(path=parent, kind="pod", **whose)
    if sandbox is not None:
        yield Target(
            path=name_of(parent, sandbox.id),
            kind="sandbox",
            runtime_id=sandbox.id,
            image=sandbox_image,
            created=sandbox.created_at / 1e9,
            **whose,
        )
    seen: set[str] = set()
    for container in observed.running:
        if container.name in seen:
            continue
        seen.add(container.name)
        yield Target(
            path=name_of(parent, container.id),
            kind="container",
            container=container.name,
            runtime_id=container.id,
            image=container.image,
            created=container.created_at / 1e9,
            **whose,
        )


class NodeTargets:
    """Keeps the collector's targets equal to what runs on the node."""

    def __init__(
        self,
        collector: Collector,
        node: Sequence[Target],
        observed: Callable[[], Iterable[tuple[Pod, ObservedPod]]],
        cgroup_of: Callable[[Pod], str],
        name_of: Callable[[str, str], str],
        sandbox_image: str,
    ) -> None:
        """Initialize; `observed` returns the pods of all workers with their last observed states."""
        self._collector = collector
        self._node = node
        self._observed = observed
        self._cgroup_of = cgroup_of
        self._name_of = name_of
        self._sandbox_image = sandbox_image
        self._seen: dict[str, ObservedPod] = {}

    async def run(self) -> None:
        """Update the targets until cancelled."""
        self._collector.set_targets(NODE, self._node)
        while True:
            self.update()
            await asyncio.sleep(TICK_SECONDS)

    def update(self) -> None:
        """Apply the changes of pods since the last update."""
        alive = set()
        for pod, observed in self._observed():
            uid = pod.uid
            alive.add(uid)
            if self._seen.get(uid) is observed:
                continue
            self._seen[uid] = observed
            try:
                parent = self._cgroup_of(pod)
            except CgroupError as err:
                log.v(2).info("Pod has no cgroup, it is not sampled", pod=pod.full_name, err=str(err))
                continue
            self._collector.set_targets(
                uid, pod_targets(observed, parent, self._name_of, self._sandbox_image)
            )
        for uid in self._seen.keys() - alive:
            del self._seen[uid]
            self._collector.set_targets(uid, ())
