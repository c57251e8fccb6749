"""One pod on a node whose runtime, volumes, disk and API server are fakes, up to its end."""

import asyncio
from types import SimpleNamespace
from typing import Any

import msgspec
from prometheus_client import CollectorRegistry

from pykubelet.api.pod import Pod
from pykubelet.api.pod_status import PodStatus
from pykubelet.kuberuntime.kill import ContainerKiller, HookRunner
from pykubelet.kuberuntime.labels import container_hash
from pykubelet.kuberuntime.observed import ObservedContainer, ObservedPod, ObservedSandbox
from pykubelet.podconfig.pod_history import PodHistory
from pykubelet.podsync.syncer import Fate, NodePodSyncer
from pykubelet.probes.prober import Prober
from pykubelet.resize.allocation_manager import AllocationManager
from pykubelet.status.compute import StatusStore
from pykubelet.transport.errors import CriError, NotFound
from tests.support.pods import NOW
from tests.unit.podsync.syncers import Sources, make_stages, make_syncer

START = int(NOW.timestamp())
"""Unix time at which the pod was started and the loop time is 0."""


class EndingNode:
    """The runtime, the volumes, the disk and the API server as one pod sees them; `calls` is their log."""

    def __init__(self, pod: Pod, *, exit_code: int = 0, stop_seconds: float = 0.0) -> None:
        self.pod = pod
        self.runtime = self
        self.version = SimpleNamespace(runtime_name="containerd")
        self.calls: list[str] = []
        self.failures: dict[str, Exception] = {}
        """What a call raises, by its entry in `calls`."""
        self.fate: Fate = "desired"
        self.may_report = asyncio.Event()
        """Set when the API server accepts the pod's status."""
        self.may_report.set()
        self.statuses, self.journal = StatusStore(), PodHistory()
        self.exit_code, self.stop_seconds = exit_code, stop_seconds
        self._loop = asyncio.get_running_loop()
        self._began = self._loop.time()
        box = ObservedSandbox(id="box", ready=True, created_at=START * 10**9, ips=("10.0.0.2",))
        self.sandboxes: tuple[ObservedSandbox, ...] = (box,)
        self.containers = {
            one.name: ObservedContainer(
                id=one.name,
                name=one.name,
                phase="running",
                sandbox_id="box",
                started_at=START * 10**9,
                hash=container_hash(one),
            )
            for one in pod.spec.containers
        }
        self.prober = Prober(self.exec_sync, lambda *_: None, CollectorRegistry(), host_ip=lambda: "")
        self.probes: list[tuple[float, str]] = []
        self._resizing = AllocationManager(self.journal)
        self._resizing.update_pod(pod, None)
        self._resizing.on_cgroup_created(pod)
        for container in pod.spec.containers:
            self._resizing.starting(pod, container)
        self.life = self.new_life()

    def new_life(self, *, cluster: bool = True) -> NodePodSyncer:
        """Build what a kubelet process knows of the pod: nothing, at first."""
        parts: Any = self
        observer: Any = SimpleNamespace(observe_pod=self._observe)
        volumes: Any = SimpleNamespace(unmount=self._unmount)
        cgroups: Any = SimpleNamespace(
            remove=self._remove_cgroup, exists=lambda pod: True, in_force=lambda *_: None
        )
        dirs: Any = SimpleNamespace(remove=lambda uid: self._call("remove directory"))
        killer = ContainerKiller(parts, HookRunner(parts, self._no_get, lambda uid: "10.0.0.2"), self.journal)
        return make_syncer(
            cri=parts,
            observer=observer,
            executor=SimpleNamespace(stop=killer.kill_pod),
            stages=make_stages(self.journal, self._resizing, cgroups=cgroups, dirs=dirs, volumes=volumes),
            prober=self.prober,
            cgroups=cgroups,
            history=self.journal,
            allocation=self._resizing,
            sources=_Sources(self, clustered=cluster),
            statuses=self.statuses,
            dirs=dirs,
            remove_logs=lambda pod: self._call("remove logs"),
            on_removed=lambda uid: self._call("removed"),
            host_ips=["10.0.0.1"],
            clock=lambda: START + self.now,
        )

    @property
    def now(self) -> float:
        """Seconds since the pod's start."""
        return self._loop.time() - self._began

    @property
    def status(self) -> PodStatus:
        found = self.statuses.get(self.pod.uid)
        assert found is not None
        return found

    def exit(self, name: str, code: int, at: float | None = None) -> None:
        """End a container, `at` so many seconds after the pod's start."""
        seconds = self.now if at is None else at
        self.containers[name] = msgspec.structs.replace(
            self.containers[name],
            phase="exited",
            exit_code=code,
            finished_at=int((START + seconds) * 10**9),
            reason="Completed" if code == 0 else "Error",
        )

    # The CRI

    async def stop_container(self, container_id: str, timeout: int) -> None:
        self._call(f"stop {container_id}")
        await asyncio.sleep(min(timeout, self.stop_seconds))
        self.exit(container_id, self.exit_code)

    async def stop_pod_sandbox(self, sandbox_id: str) -> None:
        self._call(f"stop sandbox {sandbox_id}")
        self.sandboxes = tuple(msgspec.structs.replace(box, ready=False) for box in self.sandboxes)

    async def remove_container(self, container_id: str) -> None:
        self._call(f"remove {container_id}")
        if container_id not in self.containers:
            raise NotFound("RemoveContainer", "NotFound", container_id)
        del self.containers[container_id]

    async def remove_pod_sandbox(self, sandbox_id: str) -> None:
        self._call(f"remove sandbox {sandbox_id}")
        self.sandboxes = ()

    async def exec_sync(self, container_id: str, command: list[str], timeout: float) -> Any:
        self.probes.append((round(self.now), command[0]))
        return SimpleNamespace(exit_code=0, stdout=b"", stderr=b"")

    # The rest of the node

    def _call(self, call: str) -> None:
        self.calls.append(call)
        if call in self.failures:
            raise self.failures[call]

    async def _observe(self, uid: str) -> ObservedPod:
        meta = self.pod.metadata
        return ObservedPod(
            uid=uid,
            name=meta.name,
            namespace=meta.namespace,
            sandboxes=self.sandboxes,
            containers=tuple(self.containers.values()),
        )

    def note_gone(self) -> None:
        """Record that the pod's state was dropped."""
        self._call("gone")

    async def _unmount(self, uid: str) -> None:
        self._call("unmount")

    async def _remove_cgroup(self, uid: str) -> None:
        self._call("remove cgroup")

    async def complete_deletion(self) -> None:
        """Report the pod's final status and delete the pod, as the API server's client does."""
        await self.may_report.wait()
        self._call("status reported")
        self._call("delete in API server")

    async def _no_get(self, *_: object) -> str | None:
        return "connection refused"


class _Sources(Sources):
    """Sources of the pod of an `EndingNode`."""

    def __init__(self, node: EndingNode, *, clustered: bool) -> None:
        super().__init__(
            clustered=clustered, fate_of=lambda uid: node.fate, on_removed=lambda uid: node.note_gone()
        )
        self._node = node

    async def complete_deletion(self, pod: Pod) -> None:
        """Delete the pod in a cluster; a standalone node has no API server."""
        if self.clustered:
            await self._node.complete_deletion()


def cri_failure(text: str = "busy") -> CriError:
    """Return an error of the runtime."""
    return CriError("RemoveContainer", "Unknown", text)
