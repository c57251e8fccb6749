"""A runtime that fails in a pod's step: its owner reads of it in the words that people look for."""

from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from pykubelet.api.pod import Pod
from pykubelet.kuberuntime.kill import ContainerKiller
from pykubelet.kuberuntime.observed import ObservedContainer, ObservedPod, ObservedSandbox
from pykubelet.podconfig.pod_history import PodHistory
from pykubelet.podsync.contract import KillPodOptions, SyncError
from pykubelet.podsync.syncer import NodePodSyncer
from pykubelet.probes.prober import Prober
from pykubelet.resize.allocation_manager import AllocationManager
from pykubelet.transport.errors import CriError, NotFound, Unavailable
from tests.support.pods import make_pod
from tests.unit.podsync.syncers import Sources, make_stages, make_syncer

POD = make_pod()
BOX = ObservedSandbox(id="box", ready=True, created_at=1, ips=("10.0.0.2",))
MAIN = ObservedContainer(id="main-id", name="main", phase="running", sandbox_id="box")
RUNNING = ObservedPod(uid=POD.uid, name="web", namespace="default", sandboxes=(BOX,), containers=(MAIN,))


class Faulty:
    """All that a life talks to: a runtime that fails as it is told, and nothing else."""

    def __init__(self, **failures: CriError) -> None:
        self.runtime = self
        self.version = SimpleNamespace(runtime_name="containerd")
        self._failures = failures

    def __getattr__(self, call: str) -> Any:
        async def answer(*_: object) -> ObservedPod:
            if call in self._failures:
                raise self._failures[call]
            return RUNNING

        return answer


def life(parts: Any, journal: PodHistory) -> NodePodSyncer:
    allocation, killer = AllocationManager(journal), ContainerKiller(parts, parts, journal)
    return make_syncer(
        cri=parts,
        observer=parts,
        executor=SimpleNamespace(stop=killer.kill_pod, apply=parts.apply),
        stages=make_stages(journal, allocation, cgroups=parts, dirs=parts, volumes=parts),
        prober=Prober(parts.probe, lambda *_: None, CollectorRegistry(), host_ip=lambda: ""),
        cgroups=parts,
        history=journal,
        allocation=allocation,
        sources=Sources(),
    )


def warnings(journal: PodHistory) -> list[tuple[str, str]]:
    return [(event.reason, event.message) for event in journal.events(POD.uid) if event.kind == "Warning"]


async def test_sync_observe_fails_records_failed_sync_event() -> None:
    journal, away = PodHistory(), Unavailable("ListPodSandbox", "Unavailable", "connection refused")
    with pytest.raises(SyncError, match="connection refused"):
        await life(Faulty(observe_pod=away), journal).sync(POD)
    words = "error determining status: rpc error: code = Unavailable desc = connection refused"
    assert warnings(journal) == [("FailedSync", words)]


RPC = "rpc error: code = Unknown desc ="
MAIN_FAILS = f'failed to "KillContainer" for "main" with KillContainerError: "{RPC} a"'
BOX_FAILS = f'failed to "KillPodSandbox" for "u1" with KillPodSandboxError: "{RPC} \\"cni\\""'


@pytest.mark.parametrize(
    ("failing", "words"),
    [
        (("stop_container",), MAIN_FAILS),
        (("stop_pod_sandbox",), BOX_FAILS),
        (("stop_container", "stop_pod_sandbox"), f"[{MAIN_FAILS}, {BOX_FAILS}]"),
    ],
)
@pytest.mark.parametrize("pod", [POD, None], ids=["wanted", "known to the runtime only"])
async def test_terminate_stop_fails_records_failed_kill_pod_event(
    pod: Pod | None, failing: tuple[str, ...], words: str
) -> None:
    journal = PodHistory()
    failures = {
        "stop_container": CriError("StopContainer", "Unknown", "a"),
        "stop_pod_sandbox": CriError("StopPodSandbox", "Unknown", '"cni"'),
    }
    parts = Faulty(**{call: failures[call] for call in failing})
    with pytest.raises(SyncError, match=r"^error killing pod: "):
        await life(parts, journal).terminate(POD.uid, pod, KillPodOptions(1))
    assert warnings(journal) == [("FailedKillPod", f"error killing pod: {words}")]


async def test_terminate_stop_not_found_records_no_event() -> None:
    journal, gone = PodHistory(), NotFound("Stop", "NotFound", "no such thing")
    with pytest.raises(SyncError, match="still run"):
        await life(Faulty(stop_container=gone, stop_pod_sandbox=gone), journal).terminate(
            POD.uid, POD, KillPodOptions(1)
        )
    assert warnings(journal) == []
